"""`docs/models.md` is what the table of families says."""

from __future__ import annotations

from family_reference import ABSENT, RECURRENT
from write_models_document import DOCUMENT, document

from specround.models.families import FAMILIES


def test_the_document_is_up_to_date() -> None:
    """Writing it again changes nothing: run `python tests/models/write_models_document.py` when this fails."""
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_the_document_names_what_is_tested() -> None:
    """Each model type with a row is one that the tests of families run, and the other way round."""
    from test_families_logits import GOLDEN
    from test_families_rounds import COVERING

    rows = [line.split("|")[1].strip(" `") for line in document().splitlines() if line.startswith("| `")]
    supported = rows[: len(FAMILIES)]
    assert supported == sorted({case.model_type for case in COVERING}) + sorted(RECURRENT + ABSENT)
    assert sorted(supported) == sorted(FAMILIES)
    assert all(f'"{name}"' in GOLDEN.read_text(encoding="utf-8") for name in supported)
