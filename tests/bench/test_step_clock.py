"""The clock counts each moment once and leaves the engine as it was."""

from __future__ import annotations

import pytest

from specround import LLM, SamplingParams
from specround.bench.step_clock import PARTS, StepClock, StepRecord, replaced, time_split

CONFIG = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, CONFIG, max_num_seqs=2, max_model_len=64)


class Ticks:
    """A clock that goes on by one at every look."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return float(self.looks)


def test_parts_add_up_to_the_step(llm):
    """Nested calls are counted for the inner part only: parts sum to the time between the first look and the last."""
    ticks = Ticks()
    with StepClock(llm.engine.core, clock=ticks) as clock:
        llm.generate("in the ring in the ring", SamplingParams(temperature=0, max_tokens=8))
    assert sum(step.total for step in clock.steps) == ticks.looks - len(clock.steps)
    assert [step.is_decode for step in clock.steps][:2] == [False, True]
    assert all(step.seconds["forward"] > 0 for step in clock.decode_steps)


def test_nothing_stays_wrapped(llm):
    """After the clock the engine's objects have no attribute that they did not have before, also after a failure."""
    core = llm.engine.core
    owners = (core, core.runner, core.runner.round, core.runner.model, core.scheduler)
    before = [set(vars(owner)) for owner in owners]
    with pytest.raises(ZeroDivisionError), StepClock(core):
        _ = 1 // 0
    assert [set(vars(owner)) for owner in owners] == before


def test_text_does_not_change(llm):
    """Measured and unmeasured runs generate the same tokens."""
    params = SamplingParams(temperature=0, max_tokens=8)
    plain = llm.generate("in the ring", params)[0].outputs[0].token_ids
    with StepClock(llm.engine.core):
        assert llm.generate("in the ring", params)[0].outputs[0].token_ids == plain


def test_missing_methods_are_an_error():
    """A method that is not there is refused instead of measured as nothing."""
    with pytest.raises(AttributeError, match="no_such_method"), replaced(object.__new__(Ticks), "no_such_method", id):
        pass


def test_an_instance_attribute_comes_back():
    """What was set on the object itself before is set again."""
    owner = Ticks()
    owner.step = own = lambda: 1  # type: ignore[attr-defined]
    with replaced(owner, "step", lambda method: lambda: method() + 1):
        assert owner.step() == 2  # type: ignore[attr-defined]
    assert owner.step is own  # type: ignore[attr-defined]


def test_split_of_made_up_steps():
    """Overheads are what the definitions say: the round without model and drafting, and the step without them."""
    seconds = dict(zip(PARTS, (1.0, 2.0, 50.0, 10.0, 3.0, 4.0, 0.0, 20.0, 6.0, 4.0), strict=True))
    step = StepRecord(rows=8, num_requests=2, is_decode=True, total=100.0, seconds=seconds)
    split = time_split([step, step])
    assert split["share"]["forward"] == 0.5
    assert split["round_overhead_share"] == pytest.approx(0.10)
    assert split["step_overhead_share"] == pytest.approx(0.20)
    assert (split["scheduler_us_per_step"], split["scheduler_us_per_request"]) == (6e6, 3e6)
    assert time_split([]) == {"steps": 0}
