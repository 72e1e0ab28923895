"""Write `golden/logits.json`: what transformers' eager attention computes for the tiny models. Run it by hand."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from family_reference import FamilyReference
from test_families_logits import GOLDEN, prompts_of

from specround.models.families import FAMILIES
from tiny_models import tiny_model

if __name__ == "__main__":
    values = {}
    for model_type in sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            run = FamilyReference(tiny_model(Path(folder), model_type)).run(prompts_of(11)[1])
        values[model_type] = [round(float(value), 5) for value in run.logits[-1, :8]]
    GOLDEN.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in values.items())
    GOLDEN.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
