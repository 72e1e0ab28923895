"""`python -m specround.integrations.vllm.serve serve MODEL ...`: vLLM's own command line in a prepared environment."""

from __future__ import annotations

import os
import sys

from specround.integrations.vllm.settings import prepare_environment


def main() -> int:
    """Run vLLM's command line; its worker processes find speculators in the directory it was started in."""
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [directory, os.environ.get("PYTHONPATH")]))
    prepare_environment()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
