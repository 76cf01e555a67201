"""Conversations that are saved to a file and go on elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_samples import make_engine, make_runtime
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.fake import FakeBackend
from headrace.runtime import GenerationConfig, Runtime
from headrace.runtime.commands.chat import Conversation
from headrace.runtime.errors import BackendError, EngineClosedError, RequestError
from headrace.runtime.session import _MAGIC, read_session

PROMPT = "the quick brown fox jumps over the lazy dog"
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def fed_tokens(runtime: Runtime) -> int:
    return sum(step.num_tokens for step in runtime.steps)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with make_runtime() as runtime:
        runtime.generate(PROMPT, **GREEDY)
        assert runtime.save_session(tmp_path / "file", PROMPT) == len(PROMPT)
    return tmp_path / "file"


def test_another_process_goes_on_from_the_file(saved: Path) -> None:
    longer = f"{PROMPT} and runs"
    with make_runtime() as fresh:
        expected = fresh.generate(longer, **GREEDY)
    with make_runtime() as runtime:
        session = runtime.load_session(saved)
        assert session.prompt == PROMPT and len(session.token_ids) == len(PROMPT)
        assert runtime.generate(longer, **GREEDY) == expected
        assert fed_tokens(runtime) == len(longer) - len(PROMPT) + 8 - 1


def test_a_conversation_is_saved_with_its_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "tell me about foxes"}]
    with make_runtime() as runtime:
        answer = runtime.chat(messages, **GREEDY).text
        said = [*messages, {"role": "assistant", "content": answer}]
        num_tokens = runtime.save_session(tmp_path / "file", said)
    assert num_tokens > len("user tell me about foxes assistant ")
    with make_runtime() as runtime:
        assert runtime.load_session(tmp_path / "file").prompt == said


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_file_is_for_its_owner(saved: Path) -> None:
    assert saved.stat().st_mode & 0o077 == 0
    assert [file.name for file in saved.parent.iterdir()] == ["file"]


def test_a_running_text_can_be_saved(tmp_path: Path) -> None:
    with make_runtime(FakeBackend(delay_ms=1.0)) as runtime:
        stream = runtime.stream(PROMPT, ignore_eos=True, max_new_tokens=100)
        next(stream)
        # Its last token was not there when it started.
        assert runtime.save_session(tmp_path / "file", PROMPT) == len(PROMPT) - 1
        assert sum(len(delta.token_ids) for delta in stream) == 99


def test_what_is_not_there_cannot_be_saved(tmp_path: Path) -> None:
    with make_runtime() as runtime, pytest.raises(RequestError, match="nothing of this text"):
        runtime.save_session(tmp_path / "file", PROMPT)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with make_runtime() as runtime:
        runtime.generate(PROMPT, **GREEDY)
        with pytest.raises(FileNotFoundError):
            runtime.save_session(tmp_path / "no" / "file", PROMPT)
        with pytest.raises(FileNotFoundError):
            runtime.load_session(tmp_path / "file")


def test_a_session_that_does_not_fit(saved: Path) -> None:
    with make_runtime(prefix_cache_bytes=0) as runtime:
        with pytest.raises(RequestError, match="no room to keep 43 tokens"):
            runtime.load_session(saved)
        assert runtime.generate(PROMPT, **GREEDY).token_ids


def test_kept_texts_make_room_and_running_ones_do_not(saved: Path) -> None:
    backend = FakeBackend(max_slots=1, delay_ms=1.0)
    with make_runtime(backend, max_sequences=1) as runtime:
        runtime.generate("something else that is kept", **GREEDY)
        runtime.load_session(saved)
        stream = runtime.stream("another", ignore_eos=True, max_new_tokens=50)
        next(stream)
        with pytest.raises(RequestError, match="no room"):
            runtime.load_session(saved)
        stream.close()


def test_another_package_is_refused(saved: Path) -> None:
    fields = header(saved)
    write(saved, {**fields, "kv_identity": "cpu other"})
    with make_runtime() as runtime, pytest.raises(RequestError, match="another package"):
        runtime.load_session(saved)


def damage_name(content: bytes) -> bytes:
    return b"H" + content[1:]


def damage_length(content: bytes) -> bytes:
    at = len(_MAGIC)
    return content[:at] + b"\xff" * 8 + content[at + 8 :]


def damage_kv(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage_name, "is not a session"),
        (damage_length, "is damaged"),
        (damage_kv, "is damaged"),
        (lambda content: content[:-1], "is damaged"),
        (lambda content: content + b"x", "is damaged"),
        (lambda content: content[: len(_MAGIC) + 4], "is damaged"),
        (lambda content: b"", "is not a session"),
    ],
)
def test_a_damaged_file_is_refused(
    saved: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    saved.write_bytes(change(saved.read_bytes()))
    with make_runtime() as runtime, pytest.raises(RequestError, match=message):
        runtime.load_session(saved)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(
    fields=st.dictionaries(
        st.sampled_from(["kv_identity", "kv_sha256", "token_ids", "prompt"]), json_values
    )
    | json_values,
    data=st.binary(max_size=64),
)
def test_any_header_is_refused_or_consistent(
    tmp_path_factory: pytest.TempPathFactory, fields: object, data: bytes
) -> None:
    file = tmp_path_factory.mktemp("session") / "file"
    write(file, fields, data)
    caps = FakeBackend().capabilities
    with pytest.raises(RequestError):
        read_session(file, caps)


def test_a_failing_step_fails_the_transfer() -> None:
    engine = make_engine(FakeBackend(fail_at={1}), prefix_cache_bytes=None)
    request = engine.prepare(range(1, 30), GenerationConfig(max_new_tokens=1))
    engine.add(request)
    engine.step()
    _, promise = engine.read_kv(list(range(1, 30)))
    written = engine.write_kv(list(range(2, 40)), b"\0" * 4 * 38)
    engine.step()
    for failed in (promise, written):
        with pytest.raises(BackendError, match="injected"):
            failed.result(0)
    engine.check_integrity()
    engine.add(engine.prepare(range(2, 45), GenerationConfig(max_new_tokens=1)))
    engine.step()
    assert engine.steps[-1].num_tokens == 43  # what was not written is not used


def test_closing_fails_the_transfer(saved: Path) -> None:
    engine = make_engine()
    promise = engine.write_kv(list(range(1, 30)), b"\0" * 4 * 29)
    engine.close()
    with pytest.raises(EngineClosedError):
        promise.result(0)
    runtime = make_runtime()
    runtime.close()
    with pytest.raises(EngineClosedError):
        runtime.load_session(saved)


def test_chat_saves_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "file")
    with make_runtime() as runtime:
        conversation = Conversation(runtime, None, GREEDY)
        assert conversation.keep("/save", file) == "nothing was said yet"
        conversation.ask("tell me about foxes")
        assert conversation.keep("/save", file).startswith("saved 2 messages and")
        conversation.ask("and dogs")
    with make_runtime() as runtime:
        again = Conversation(runtime, None, GREEDY)
        assert again.keep("/load", file).startswith("2 messages, ")
        again.ask("and dogs")
        runtime.generate(PROMPT, **GREEDY)
        runtime.save_session(file, PROMPT)
        assert again.keep("/load", file) == f"{file} is no conversation"
        assert "No such file" in again.keep("/load", f"{file}x")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == lines[2]


def header(file: Path) -> dict[str, object]:
    content = file.read_bytes()[len(_MAGIC) :]
    size = int.from_bytes(content[:8], "little")
    fields: dict[str, object] = json.loads(content[8 : 8 + size])
    return fields


def write(file: Path, fields: object, data: bytes = b"") -> None:
    encoded = json.dumps(fields).encode()
    file.write_bytes(_MAGIC + len(encoded).to_bytes(8, "little") + encoded + data)
