"""`LLM`: the front end: prompts in, text out, over an engine core."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from specround.contract import RequestError, SpeculatorError
from specround.engine.build import build_engine
from specround.engine.config import EngineConfig
from specround.engine.detokenizer import Detokenizer
from specround.engine.inputs import InputProcessor, Prompt, as_params, as_prompts
from specround.engine.messages import RequestUpdate
from specround.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from specround.engine.sampling_params import SamplingParams
from specround.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A language model with a speculator that owns the round. Use it from one thread.

    Args:
        model: Local Hugging Face directory, `.gguf` file, alias such as `"smollm2"`, or hub id.
        speculative_config: `{"method": ..., "num_speculative_tokens": K, ...}` or None for plain decoding.
        on_load: Called with (done, total, name) while weights load.
        settings: The other settings of `EngineConfig`: `dtype`, `quantization`, `max_model_len`, `max_num_seqs`,
            `max_num_batched_tokens`, `block_size`, `kv_cache_memory_bytes` or `num_blocks`, `state_mode`,
            `num_state_blocks`, `seed`, `device`, `async_scheduling`, `check_values`, `cuda_graphs`, `record_rounds`.

    Raises:
        ConfigError: A setting is unknown, out of range or does not fit the model.
        ModelError: The model cannot be loaded.

    Example:
        >>> llm = LLM("smollm2", speculative_config={"method": "ngram", "num_speculative_tokens": 5})
        >>> llm.generate("1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str,
        speculative_config: Mapping[str, Any] | None = None,
        *,
        on_load: Callable[[int, int, str], None] | None = None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.from_settings(model=model, speculative_config=speculative_config, **settings)
        self.engine = build_engine(self.config, on_load)
        self._core = self.engine.core
        model_ = self.engine.model
        self._inputs = InputProcessor(
            model_.tokenizer, model_.vocab_size, self.engine.max_model_len, model_.eos_token_ids
        )
        self._seeds = random.Random(self.config.seed)
        self._next_id = 0
        self._inboxes: dict[str, deque[RequestUpdate]] = {}
        """Where each unfinished request's updates go: runs that overlap take turns in stepping the one core."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None."""
        return self.engine.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        request_ids: Sequence[str] | None = None,
        on_update: Callable[[RequestOutput, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for some prompts at once.

        Args:
            prompts: A string, `{"prompt_token_ids": [...]}`, or a list of them.
            sampling_params: For all, or one for each.
            request_ids: One for each, unique; None = numbered.
            on_update: Called with a request's output so far and the number of tokens it just got.

        Returns:
            Outputs in the order of the prompts. In a batch, a request that is refused fails alone: its `error` says
            why and its finish reason is "error".

        Raises:
            RequestError: The only request is refused, or the arguments do not fit together.
            SpeculatorError: A speculator's hook failed; the engine is stopped.
        """
        outputs: dict[int, RequestOutput] = {}
        for place, output, new_tokens in self._run(as_prompts(prompts), sampling_params, request_ids):
            outputs[place] = output
            if on_update is not None:
                on_update(output, new_tokens)
        return [outputs[place] for place in sorted(outputs)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it grew; text never shrinks again."""
        for _, output, _ in self._run(as_prompts(prompts), sampling_params, request_ids):
            yield output.snapshot()

    def chat(self, messages: Messages | Sequence[Messages], sampling_params: Params = None) -> list[RequestOutput]:
        """Generate the assistant's next message for one conversation or several.

        Args:
            messages: `[{"role": ..., "content": ...}, ...]`, or a list of such conversations.
            sampling_params: For all, or one for each.

        Raises:
            RequestError: The model has no chat template, or a conversation is malformed.
        """
        if self.tokenizer is None:
            raise RequestError("messages", messages, "unused: this model has no tokenizer")
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError("messages", messages, "a non-empty list of {'role': ..., 'content': ...}")
        several = messages if isinstance(messages[0], (list, tuple)) else [messages]
        return self.generate([{"messages": each} for each in several], sampling_params)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Finish requests of a running `stream` or `generate`; unknown ids are ignored.

        Raises:
            RequestError: No sequence of ids.
        """
        if isinstance(request_ids, str) or not isinstance(request_ids, Sequence):
            raise RequestError("request_ids", request_ids, "a list of request ids")
        self._deliver(self._core.abort(request_ids))

    def shutdown(self) -> None:
        """Drop all requests and refuse new ones."""
        self._core.shutdown()

    def _run(
        self, prompts: list[Prompt], sampling_params: Params, request_ids: Sequence[str] | None
    ) -> Iterator[tuple[int, RequestOutput, int]]:
        params = as_params(sampling_params, len(prompts))
        names = self._names(request_ids, len(prompts))
        live: dict[str, _LiveRequest] = {}
        refused: list[tuple[int, RequestOutput, int]] = []
        inbox: deque[RequestUpdate] = deque()
        try:
            for place, (prompt, param, name) in enumerate(zip(prompts, params, names, strict=True)):
                try:
                    live[name] = self._add(place, prompt, param, name)
                    self._inboxes[name] = inbox
                except RequestError as error:
                    if len(prompts) == 1:
                        raise
                    refused.append((place, _refused(name, prompt, error), 0))
            yield from refused
            while live:
                if not inbox:
                    self._deliver(self._core.step())
                while inbox:
                    update = inbox.popleft()
                    request = live.get(update.request_id)
                    if request is None:
                        continue
                    new_tokens = request.take(update)
                    if request.output.finished:
                        del live[update.request_id]
                        kept = len(request.output.outputs[0].token_ids)
                        self._release([update.request_id], inbox, {update.request_id: kept})
                    yield request.place, request.output, new_tokens
            self._drain()
        finally:
            self._release(live, inbox)

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            if update.request_id in self._inboxes:
                self._inboxes[update.request_id].append(update)

    def _drain(self) -> None:
        """Finish what finished requests left behind; a hook that fails here fails nobody's request."""
        try:
            while self._core.has_work and not self._inboxes:
                self._core.step()
        except SpeculatorError as error:
            logger.error("after the last request had finished: %s", error)

    def _release(
        self, names: Iterable[str], inbox: deque[RequestUpdate], kept: Mapping[str, int] | None = None
    ) -> None:
        """End requests of a run, unless their id went to another run meanwhile."""
        own = [name for name in names if self._inboxes.get(name) is inbox]
        self._core.abort(own, kept)
        for name in own:
            del self._inboxes[name]

    def _add(self, place: int, prompt: Prompt, params: SamplingParams, name: str) -> _LiveRequest:
        text, ids = self._inputs.tokenise(prompt)
        self._core.add(self._inputs.build(name, ids, params, self._seeds.getrandbits(64)))
        output = RequestOutput(request_id=name, prompt=text, prompt_token_ids=list(ids), outputs=[CompletionOutput()])
        return _LiveRequest(place, output, params, self.tokenizer)

    def _names(self, request_ids: Sequence[str] | None, count: int) -> list[str]:
        if request_ids is not None:
            whole = isinstance(request_ids, (list, tuple)) and all(isinstance(name, str) for name in request_ids)
            if not whole or len(request_ids) != count:
                raise RequestError("request_ids", request_ids, f"a list of {count} strings, one per prompt")
            return list(request_ids)
        names: list[str] = []
        while len(names) < count:
            if str(self._next_id) not in self._inboxes:
                names.append(str(self._next_id))
            self._next_id += 1
        return names


class _LiveRequest:
    """A request between its start and its end, as the front end sees it."""

    def __init__(self, place: int, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.place, self.output = place, output
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                output.prompt_token_ids,
                stop=params.stop or (),
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        self._include_stop = params.include_stop_str_in_output

    def take(self, update: RequestUpdate) -> int:
        """Take in a step's tokens; the number that were kept."""
        completion, tokens = self.output.outputs[0], update.new_token_ids
        finish: str | None = update.finish_reason
        reason: int | str | None = update.stop_reason
        hidden = update.finish_reason == "stop" and not self._include_stop  # a stop token is not part of the text
        for kept, token in enumerate(tokens, 1):
            completion.token_ids.append(token)
            if self._detokenizer is None or (hidden and kept == len(tokens)):
                continue
            stop = self._detokenizer.feed(token)
            if stop is not None:
                tokens, finish, reason = tokens[:kept], "stop", stop
                break
        if finish is not None and self._detokenizer is not None and not isinstance(reason, str):
            stop = self._detokenizer.finish()
            if stop is not None:
                finish, reason = "stop", stop
        self._count(update, len(tokens))
        completion.finish_reason, completion.stop_reason = finish, reason
        self.output.finished = finish is not None
        if self._detokenizer is not None:
            completion.text = self._detokenizer.text if self.output.finished else self._detokenizer.settled_text
        return len(tokens)

    def _count(self, update: RequestUpdate, kept: int) -> None:
        metrics: RequestMetrics = self.output.metrics
        if update.new_token_ids:
            metrics.rounds += 1
            metrics.drafted += update.drafted
            metrics.accepted += min(kept, update.accepted)
            metrics.committed += kept
        if update.trace is not None:
            self.output.rounds.append(update.trace.cut(kept))


def _refused(name: str, prompt: Prompt, error: RequestError) -> RequestOutput:
    failed = CompletionOutput(finish_reason="error", stop_reason=str(error))
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(
        request_id=name, prompt=text, prompt_token_ids=[], outputs=[failed], finished=True, error=error
    )
