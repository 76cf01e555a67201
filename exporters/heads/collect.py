"""What heads are trained on: texts, and the hidden state that each of their tokens was drawn from.

The states are those of the package that the heads are for, as its graph gives them. Answers to
prompts are written by the package itself, through the engine, which comes by their states at no
further cost (self-distillation, Cai et al., 2024); the tokens of given texts are read in chunks.

    texts.jsonl   one line a text: {"tokens": [...]}
    states.f16    float16 [tokens of all texts, hidden], in their order

A text's states are written before its line, so that an interrupted collection goes on behind the
last complete text. What is there already depends on what was asked for alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from headrace.backends.base import StepOutput
from headrace.backends.registry import create_backend
from headrace.exporters.heads.wanted import CHUNK_TOKENS, Collected, Half, Wanted
from headrace.exporters.validate import GraphRunner
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.core import Sequence
from headrace.runtime.draft_heads import DraftHeads
from headrace.runtime.engine import Engine
from headrace.runtime.errors import ExportError
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import HIDDEN, Manifest, package_path, read_manifest
from headrace.runtime.package_prompts import encode_prompts
from headrace.runtime.tokenizer import Tokenizer

TEXTS_FILE, STATES_FILE = "texts.jsonl", "states.f16"
MAX_NEW_TOKENS = 256
_TEMPERATURE = 0.7  # of all answers but the first
_SEQUENCES = 16
_GROUP_PROMPTS = 16  # answered before anything is written

Report = Callable[[str, int, int], None]


def collect(package: Path, wanted: Wanted, folder: Path, report: Report) -> Collected:
    """Collect what is not in `folder` yet.

    Raises:
        PackageError: the package cannot be read or run.
        ExportError: `folder` cannot be written.
    """
    manifest = read_manifest(package)
    tokenizer = Tokenizer.load(package, manifest.tokenizer)
    ids = tokenizer.encode_prompt(wanted.text) if wanted.text else []
    chunks = [
        ids[i : i + CHUNK_TOKENS] for i in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS)
    ]
    prompts = encode_prompts(package, manifest, wanted.prompts)
    store = _Store(folder, manifest.model.hidden_size)
    total = len(prompts) * wanted.answers + len(chunks)
    try:
        done = store.open()
        report("collecting", done, total)
        for number, (tokens, states) in enumerate(
            _texts(package, manifest, prompts, wanted.answers, chunks, done), done + 1
        ):
            store.add(tokens, states)
            report("collecting", number, total)
        return store.read()
    except OSError as error:
        raise ExportError(f"cannot write {folder}: {error}") from None


def _texts(
    package: Path,
    manifest: Manifest,
    prompts: list[list[int]],
    answers: int,
    chunks: list[list[int]],
    done: int,
) -> Iterator[tuple[list[int], Half]]:
    """Texts behind the first `done`; of a prompt that was begun all answers are written again."""
    first, skipped = divmod(done, answers)
    if first < len(prompts):
        writer = _Writer(package, manifest)
        try:
            for start in range(first, len(prompts), _GROUP_PROMPTS):
                found = writer.answers(prompts[start : start + _GROUP_PROMPTS], answers)
                yield from found[skipped:]
                skipped = 0
        finally:
            writer.close()
    read = max(done - len(prompts) * answers, 0)
    if read < len(chunks):
        reader = _Reader(package, manifest)
        for chunk in chunks[read:]:
            yield chunk[1:], reader.states(chunk)


class _Writer:
    """Lets the package answer, and hears from the engine what the answers were drawn from."""

    def __init__(self, package: Path, manifest: Manifest) -> None:
        config = EngineConfig(max_sequences=_SEQUENCES, max_draft_tokens=0)
        backend = create_backend("cpu", package, manifest, config, probe_hardware())
        eos_token_ids = manifest.tokenizer.eos_token_ids
        self._recorder = _Recorder()
        self._engine = Engine(
            backend, lambda _: _NoText(), eos_token_ids, config, draft_heads=self._recorder
        )

    def answers(self, prompts: list[list[int]], count: int) -> list[tuple[list[int], Half]]:
        """`count` answers to each prompt, in order."""
        requests = []
        for number in range(count * len(prompts)):
            seed = number % count
            config = GenerationConfig(
                max_new_tokens=MAX_NEW_TOKENS, temperature=_TEMPERATURE if seed else 0.0, seed=seed
            )
            requests.append(self._engine.prepare(prompts[number // count], config))
            self._engine.add(requests[-1])
        written: dict[int, list[int]] = {request.request_id: [] for request in requests}
        while self._engine.has_work:
            for event in self._engine.step():
                if event.delta is None:
                    raise ExportError(f"an answer could not be written: {event.error}")
                written[event.request.request_id] += event.delta.token_ids
        states = self._recorder.states
        return [(tokens, np.stack(states.pop(seq_id))) for seq_id, tokens in written.items()]

    def close(self) -> None:
        self._engine.close()


class _Recorder(DraftHeads):
    """Heads that only listen.

    Attributes:
        states: by sequence, what each of its tokens was drawn from.
    """

    def __init__(self) -> None:
        self.states: dict[int, list[Half]] = {}

    def keep(self, sequence: Sequence, num_sampled: int, output: StepOutput, line: int) -> None:
        """See `DraftHeads`; without drafts a step gives one token."""
        assert output.hidden is not None and num_sampled == 1
        state = output.hidden[line].astype(np.float16)
        self.states.setdefault(sequence.seq_id, []).append(state)

    def close(self) -> None:
        """Nothing is held but states."""


class _Reader:
    """Reads texts with the package's graph."""

    def __init__(self, package: Path, manifest: Manifest) -> None:
        target = next(target for target in manifest.targets if target.device == "cpu")
        graph = package_path(package, target.graphs[0].file)
        self._runner = GraphRunner(graph, CHUNK_TOKENS)

    def states(self, ids: list[int]) -> Half:
        """float16 [len(ids) - 1, hidden]: what each token but the first would be drawn from."""
        self._runner.reset()
        states: Half = self._runner.append(ids)[HIDDEN][:-1].astype(np.float16)
        return states


class _Store:
    """The two files."""

    def __init__(self, folder: Path, hidden_size: int) -> None:
        self._folder, self._hidden_size = folder, hidden_size
        self._texts, self._states = folder / TEXTS_FILE, folder / STATES_FILE

    def open(self) -> int:
        """Drop what is incomplete; how many texts there are."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = self._lines()
        self._texts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        count = sum(len(json.loads(line)["tokens"]) for line in lines)
        with self._states.open("ab") as stream:
            stream.truncate(count * self._hidden_size * 2)
        return len(lines)

    def add(self, tokens: list[int], states: Half) -> None:
        assert states.shape == (len(tokens), self._hidden_size)
        with self._states.open("ab") as stream:
            stream.write(states.tobytes())
        with self._texts.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"tokens": tokens}) + "\n")

    def read(self) -> Collected:
        texts = [json.loads(line)["tokens"] for line in self._lines()]
        starts = np.cumsum([0, *map(len, texts)]).tolist()
        tokens = np.array([token for text in texts for token in text], np.int64)
        shape = (len(tokens), self._hidden_size)
        return Collected(tokens, np.memmap(self._states, np.float16, "r", shape=shape), starts)

    def _lines(self) -> list[str]:
        """Complete ones, whose states are complete, too."""
        if not self._texts.exists() or not self._states.exists():
            return []
        room = self._states.stat().st_size // (2 * self._hidden_size)
        found: list[str] = []
        for line in self._texts.read_text(encoding="utf-8").splitlines():
            try:
                room -= len(json.loads(line)["tokens"])
            except (ValueError, KeyError, TypeError):
                break
            if room < 0:
                break
            found.append(line)
        return found


class _NoText:
    """Nobody reads it."""

    stopped = None

    def push(self, token_ids: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def take_calls(self) -> tuple[()]:
        return ()
