"""`python -m specround.integrations.vllm.serve serve MODEL ...`: vLLM's own command line in a prepared environment."""

from __future__ import annotations

import os
import sys
from importlib.metadata import distributions

from specround.integrations.vllm.settings import prepare_environment


def main() -> None:
    """Run vLLM's command line; its worker processes find speculators in the directory it was started in."""
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [directory, os.environ.get("PYTHONPATH")]))
    if "vllm" in {distribution.name for distribution in distributions()}:
        from vllm.entrypoints.cli.main import main as run

        sys.argv[0] = "vllm"
    else:  # vLLM's command line asks for the version of a distribution of that name; its server does not
        from vllm.entrypoints.launchers.api_server.entry import main as run

        sys.argv[:3] = ["vllm", "--model", sys.argv[2]]
    run()


if __name__ in ("__main__", "__mp_main__"):  # processes that vLLM spawns import this module before vLLM
    prepare_environment()
if __name__ == "__main__":
    main()
