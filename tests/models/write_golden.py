"""Write `golden/logits.json` from references of the tiny models. Run it by hand.

They are transformers' eager attention and, for recurrent modules, the loops of `mixer_reference`: the gated norms of
transformers are not the same in all versions.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from family_reference import FamilyReference, RecurrentReference
from test_families_logits import GOLDEN, prompts_of

from specround.models.families import FAMILIES
from tiny_models import tiny_model

if __name__ == "__main__":
    values = {}
    for model_type in sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            kind = RecurrentReference if FAMILIES[model_type].recurrent else FamilyReference
            run = kind(tiny_model(Path(folder), model_type)).run(prompts_of(11)[1])
        values[model_type] = [round(float(value), 5) for value in run.logits[-1, :8]]
    GOLDEN.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in values.items())
    GOLDEN.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
