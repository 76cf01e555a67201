"""The library's front door: a model that is loaded once and asked from any number of threads.

    with Runtime.load("smollm2") as runtime:
        print(runtime.generate("The capital of France is", max_new_tokens=8).text)
        for delta in runtime.stream("Once upon a time"):
            print(delta.text, end="", flush=True)

Blocking calls (`generate`, `agenerate`, and `chat` without `stream`) wait for room in the queue;
calls that return at once (`submit`, `stream`, `astream`) raise QueueFullError.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from headrace.backends.base import Capabilities
from headrace.runtime.chat.prompt import PromptTokenizer
from headrace.runtime.chat.tool_choice import Tools
from headrace.runtime.completion import Completion, TokenDelta
from headrace.runtime.config import EngineConfig, GenerationConfig, merge
from headrace.runtime.core import LaneRecord, StepRecord
from headrace.runtime.engine import Engine
from headrace.runtime.preparing import Preparer
from headrace.runtime.prompts import (
    Messages,
    Prompt,
    is_conversation,
    split_prompts,
)
from headrace.runtime.session import Session, read_session, write_session
from headrace.runtime.waiting import iterate, run_all
from headrace.runtime.worker import Listener, RequestHandle, Worker

_EXIT_TIMEOUT_S = 5.0


class Runtime:
    """A loaded model. Thread-safe; one engine thread; close it, or use it as a context manager.

    Made by `Runtime.load`. The constructor takes the parts, for tests and special set-ups.

    Args:
        engine: owned from now on.
        tokenizer: of the model.
        default_config: used where a call gives no config.
        chat_template: of the model; `chat` needs one.

    Raises:
        TemplateError: the chat template cannot be compiled.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PromptTokenizer,
        *,
        default_config: GenerationConfig | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._preparer = Preparer(engine, tokenizer, chat_template)
        self.default_config = default_config or GenerationConfig()
        self._engine, self.tokenizer = engine, tokenizer
        self._worker = Worker(engine)
        # Also at interpreter exit, where a daemon thread must not be inside native code.
        self._finalizer = weakref.finalize(self, self._worker.close, _EXIT_TIMEOUT_S)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str = "auto",
        *,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> Runtime:
        """Load a package.

        Args:
            folder: made by `runtime-export`.
            device: "cpu", "cuda", or "auto" for the latter where package and machine can.
            config: how to use the machine.
            options: fields of `EngineConfig`, over those of `config`.

        Raises:
            ConfigError: an option is wrong.
            PackageError: the package cannot be read.
            BackendError: the device cannot be used, or memory is short.
        """
        from headrace.runtime.factory import load_runtime

        return load_runtime(Path(folder), device, merge(config or EngineConfig(), options))

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The newest steps, oldest first, for measurements."""
        return tuple(self._engine.steps.copy())

    @property
    def lanes(self) -> tuple[LaneRecord, ...]:
        """Who shared the newest steps, oldest first."""
        return tuple(self._engine.log.lanes.copy())

    @property
    def occupancy(self) -> tuple[int, int]:
        """Answers that have a slot, and answers that wait for one."""
        return self._engine.num_running, self._engine.num_waiting

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests: closed, or stopped by an error."""
        return self._worker.closed_by is not None

    @overload
    def generate(
        self, prompts: Prompt, config: GenerationConfig | None = None, **overrides: Any
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        config: GenerationConfig | None = None,
        **overrides: Any,
    ) -> list[Completion]: ...

    def generate(
        self, prompts: Any, config: GenerationConfig | None = None, **overrides: Any
    ) -> Completion | list[Completion]:
        """Decode one prompt or many and wait for all of it.

        Args:
            prompts: a text, a list of token ids, or a list of those; the result is alike. Texts
                get the BOS token that the model wants, token ids are taken as they are.
            config: how; the model's defaults unless given.
            overrides: fields of `GenerationConfig`, over those of `config`.

        Raises:
            ConfigError, RequestError: something is wrong; of many prompts it names the index, and
                nothing was started.
            BackendError: the device failed; the other prompts are cancelled.
            EngineClosedError: the runtime was closed.
        """
        merged = self._merge(config, overrides)
        is_single, items = split_prompts(prompts)
        if is_single:
            return run_all(self._worker, [self._preparer.request(items[0], merged)])[0]
        return run_all(self._worker, self._preparer.requests(items, merged))

    def stream(
        self, prompt: Prompt, config: GenerationConfig | None = None, **overrides: Any
    ) -> Iterator[TokenDelta]:
        """Decode a prompt piece by piece, starting with the first `next`.

        Closing the iterator, or dropping it, cancels the request.

        Raises:
            as `generate`, and QueueFullError at the first `next`.
        """
        return iterate(self._worker, self._preparer.request(prompt, self._merge(config, overrides)))

    @overload
    def chat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        stream: Literal[False] = False,
        tools: Tools | None = None,
        tool_choice: str = "auto",
        **overrides: Any,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        stream: Literal[True],
        tools: Tools | None = None,
        tool_choice: str = "auto",
        **overrides: Any,
    ) -> Iterator[TokenDelta]: ...

    def chat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        stream: bool = False,
        tools: Tools | None = None,
        tool_choice: str = "auto",
        **overrides: Any,
    ) -> Completion | Iterator[TokenDelta]:
        """The assistant's next message, in the model's chat format.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.
            stream: return the pieces as `stream` does, instead of the whole.
            tools: functions that the model may call, as OpenAI's API describes them. Calls come
                as `tool_calls` of the answer.
            tool_choice: "auto" leaves it to the model, "none" offers no tools, "required" or the
                name of a function forces one call.

        Raises:
            as `generate`, and TemplateError where the model's template refuses the messages.
        """
        request = self._preparer.chat_request(
            messages, self._merge(config, overrides), tools, tool_choice
        )
        return iterate(self._worker, request) if stream else run_all(self._worker, [request])[0]

    def submit(
        self,
        prompt: Prompt | Messages,
        config: GenerationConfig | None = None,
        *,
        on_delta: Listener | None = None,
        **overrides: Any,
    ) -> RequestHandle:
        """Start decoding a prompt, or the answer to a conversation, and return at once.

        Args:
            on_delta: called with each piece, and with None at the end, when the handle has the
                result. It is called by the engine's thread, so it should pass the piece on and
                return. If it raises, the request is cancelled.

        Raises:
            as `generate`, and QueueFullError.
        """
        merged = self._merge(config, overrides)
        if is_conversation(prompt):
            request = self._preparer.chat_request(prompt, merged)
        else:
            request = self._preparer.request(prompt, merged)
        handle = self._worker.submit(request, streaming=True, listener=on_delta)
        handle.keep_alive = self
        return handle

    def cancel(self, request: RequestHandle | int) -> None:
        """End a request, given its handle or `request_id`; nothing for one that has ended."""
        self._worker.cancel(request if isinstance(request, int) else request.request_id)

    @overload
    async def agenerate(
        self, prompts: Prompt, config: GenerationConfig | None = None, **overrides: Any
    ) -> Completion: ...

    @overload
    async def agenerate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        config: GenerationConfig | None = None,
        **overrides: Any,
    ) -> list[Completion]: ...

    async def agenerate(
        self, prompts: Any, config: GenerationConfig | None = None, **overrides: Any
    ) -> Completion | list[Completion]:
        """`generate` for asyncio. Cancelling the task cancels the requests."""
        import asyncio

        from headrace.runtime.waiting_async import arun_all

        merged = self._merge(config, overrides)
        is_single, items = split_prompts(prompts)
        if is_single:
            request = await asyncio.to_thread(self._preparer.request, items[0], merged)
            return (await arun_all(self._worker, [request]))[0]
        requests = await asyncio.to_thread(self._preparer.requests, items, merged)
        return await arun_all(self._worker, requests)

    async def astream(
        self, prompt: Prompt, config: GenerationConfig | None = None, **overrides: Any
    ) -> AsyncGenerator[TokenDelta, None]:
        """`stream` for asyncio; every error comes at the first step of the iteration."""
        import asyncio

        from headrace.runtime.waiting_async import aiterate

        merged = self._merge(config, overrides)
        request = await asyncio.to_thread(self._preparer.request, prompt, merged)
        async with aclosing(aiterate(self._worker, request)) as deltas:
            async for delta in deltas:
                yield delta

    @overload
    async def achat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        stream: Literal[False] = False,
        tools: Tools | None = None,
        tool_choice: str = "auto",
        **overrides: Any,
    ) -> Completion: ...

    @overload
    async def achat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        stream: Literal[True],
        tools: Tools | None = None,
        tool_choice: str = "auto",
        **overrides: Any,
    ) -> AsyncGenerator[TokenDelta, None]: ...

    async def achat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        stream: bool = False,
        tools: Tools | None = None,
        tool_choice: str = "auto",
        **overrides: Any,
    ) -> Completion | AsyncGenerator[TokenDelta, None]:
        """`chat` for asyncio: `await` gives the completion or, with `stream`, an iterator."""
        import asyncio

        from headrace.runtime.waiting_async import aiterate, arun_all

        merged = self._merge(config, overrides)
        request = await asyncio.to_thread(
            self._preparer.chat_request, messages, merged, tools, tool_choice
        )
        if stream:
            return aiterate(self._worker, request)
        return (await arun_all(self._worker, [request]))[0]

    def save_session(self, path: str | Path, prompt: Prompt | Messages) -> int:
        """Write a prompt or conversation and what is in the cache of it to a file, for a later
        `load_session`; returns how many tokens are.

        The file holds the text as it is; it is readable by its owner alone.

        Raises:
            RequestError: nothing of it is in the cache.
            OSError: the file cannot be written; one that was there before is left.
        """
        if is_conversation(prompt):
            tokens = self._preparer.chat_prompt(prompt, self.default_config).token_ids
        else:
            tokens = self._preparer.token_ids(prompt)
        num_tokens, data = self._worker.run(lambda engine: engine.read_kv(tokens)).result()
        identity = self.capabilities.kv_identity
        write_session(Path(path), identity, prompt, tokens[:num_tokens], data.result())
        return num_tokens

    def load_session(self, path: str | Path) -> Session:
        """Take what a file has of a prompt or conversation into the cache: whatever begins like it
        starts behind it.

        Raises:
            RequestError: not a session, one of another package, or there is no room for it.
            OSError: the file cannot be read.
        """
        session, data = read_session(Path(path), self.capabilities)
        tokens = list(session.token_ids)
        self._worker.run(lambda engine: engine.write_kv(tokens, data)).result().result()
        return session

    def close(self) -> None:
        """Fail what is not finished, stop the thread and free the memory. Idempotent."""
        self._worker.close()
        self._finalizer.detach()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _merge(
        self, config: GenerationConfig | None, overrides: Mapping[str, Any]
    ) -> GenerationConfig:
        return merge(config or self.default_config, overrides)
