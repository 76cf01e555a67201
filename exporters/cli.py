"""`runtime-export SOURCE -o DIR`: a checkpoint becomes a package; and what is done to packages."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.exporters.cuda_target import CUDA_TARGETS
from headrace.exporters.encoder_package import EncoderExport, export_encoder, is_encoder_source
from headrace.exporters.heads import cli as heads_cli
from headrace.exporters.options import (
    CPU_TARGET,
    DEFAULT_FORMS,
    DEFAULT_QAT_STEPS,
    DEFAULT_THRESHOLD_NATS,
    KV_CACHES,
    PRESETS,
    ExportOptions,
)
from headrace.exporters.package import ExportResult, Progress, export_package
from headrace.exporters.precision import DEFAULT_PRECISION, PRECISIONS, parse_rule
from headrace.exporters.stop_signals import stopping_when_asked
from headrace.runtime.errors import ConfigError, HeadraceError
from headrace.runtime.text_files import read_text


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, 1 for a failure with a one-line reason, 2 for wrong usage."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows another
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in heads_cli.COMMANDS:
        args = heads_cli.parse(words[0], words[1:])
    else:
        args = _parser().parse_args(words)
        args.run = _export
    try:
        with (
            stopping_when_asked() as raise_asked,
            _progress_bar(args.quiet, raise_asked) as progress,
        ):
            summary: str = args.run(args, progress)
    except ConfigError as error:
        return _complain(error, 2)
    except (HeadraceError, OSError) as error:
        return _complain(error, 1)
    except MemoryError:
        return _complain("ran out of memory; nothing was written", 1)
    except KeyboardInterrupt:
        kept = "; nothing was written"
        if getattr(args, "is_resumable", False) or getattr(args, "qat", None) is not None:
            kept += "; the same command goes on with the training"
        return _complain(f"interrupted{kept}", 130)
    if not args.quiet:
        print(summary)
    return 0


def _export(args: argparse.Namespace, progress: Progress) -> str:
    """Export a decoder or an encoder, whichever the source is; returns what there is to say."""
    is_encoder = is_encoder_source(args.source)
    options = _options(args, {} if is_encoder else PRESETS.get(args.preset, {}))
    options.check()
    if not is_encoder:
        result = export_package(args.source, args.output, options=options, progress=progress)
        return _summary(args.output, result)
    encoder = export_encoder(args.source, args.output, options=options, progress=progress)
    return _encoder_summary(args.output, encoder)


def _options(args: argparse.Namespace, preset: Mapping[str, str]) -> ExportOptions:
    """Raises ConfigError: a rule is none, or the calibration text cannot be used."""
    text = args.calibration_text
    return ExportOptions(
        targets=tuple(args.target.split(",")),
        precision=args.precision or preset.get("precision", DEFAULT_PRECISION),
        kv_cache=args.kv_cache or preset.get("kv_cache", "auto"),
        forms=tuple(args.form.split(",")),
        stages=args.stages,
        rules=[parse_rule(rule) for rule in args.rule],
        quant_threshold=args.quant_threshold,
        force=args.force,
        calibrate=args.calibrate,
        calibration_text=None if text is None else read_text(text, "calibration_text"),
        overwrite=args.overwrite,
        qat_text=None if args.qat is None else read_text(args.qat, "qat"),
        qat_steps=args.qat_steps,
        tensor_parallel=args.tensor_parallel,
    )


def _complain(reason: object, code: int) -> int:
    print(f"runtime-export: {' '.join(str(reason).split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="runtime-export",
        description="Turn a checkpoint into a headrace package of ONNX graphs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="precisions:\n"
        + "\n".join(f"  {p.name:11} {p.summary}" for p in PRECISIONS.values())
        + "\n\ntargets:\n"
        + f"  {CPU_TARGET:11} graphs for the CPU, in the chosen precision\n"
        + "\n".join(f"  {t.name:11} {t.summary}" for t in CUDA_TARGETS.values())
        + f"\n\nother commands, each with --help: {', '.join(heads_cli.COMMANDS)}",
    )
    parser.add_argument("source", type=Path, help="GGUF file or Hugging Face folder")
    parser.add_argument("-o", "--output", type=Path, required=True, help="package folder to make")
    parser.add_argument(
        "--target",
        default=CPU_TARGET,
        metavar="LIST",
        help="what the package is for, such as cpu,cuda_fp16 (default: %(default)s)",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="low-memory: INT4 weights and an INT8 cache of decoders"
    )
    parser.add_argument(
        "-p",
        "--precision",
        choices=PRECISIONS,
        metavar="NAME",
        help=f"default: {DEFAULT_PRECISION}",
    )
    parser.add_argument(
        "--kv-cache",
        choices=KV_CACHES,
        help="auto: int8 if it costs little enough (default)",
    )
    parser.add_argument(
        "--form",
        default=",".join(DEFAULT_FORMS),
        metavar="LIST",
        help="graph forms: ragged, uniform, tree (default: %(default)s)",
    )
    parser.add_argument(
        "--stages",
        type=int,
        default=1,
        metavar="N",
        help="write the graphs for the CPU in N consecutive parts, too",
    )
    parser.add_argument(
        "--quant-threshold",
        type=float,
        metavar="NATS",
        help="mean KL against the FP32 model that the package may have "
        f"(default: {DEFAULT_THRESHOLD_NATS} for auto, else none)",
    )
    parser.add_argument("--force", action="store_true", help="write it although it is over that")
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="pin weights by name, such as '*.down_proj=fp32'; repeatable, first match wins",
    )
    parser.add_argument(
        "--calibration-text", type=Path, metavar="FILE", help="instead of the prose of headrace"
    )
    parser.add_argument(
        "--no-calibration",
        dest="calibrate",
        action="store_false",
        help="round to nearest, float32 cache, nothing measured: faster",
    )
    parser.add_argument(
        "--qat",
        type=Path,
        metavar="FILE",
        help="train the weights in their formats on this text; needs torch. The state is kept in "
        "DIR.qat, and the same command takes it up after an interruption",
    )
    parser.add_argument(
        "--qat-steps", type=int, default=DEFAULT_QAT_STEPS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="split every target between N processes, a card each",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing package")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, no summary")
    return parser


@contextmanager
def _progress_bar(quiet: bool, raise_asked: Callable[[], None]) -> Iterator[Progress]:
    if quiet:
        yield lambda *_: raise_asked()
        return
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    bar = RichProgress(console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        raise_asked()
        bar.start()  # not before: a failure at once is one line
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=total)
        bar.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bar.stop()


def _summary(output: Path, result: ExportResult) -> str:
    target, *more = result.manifest.targets
    lines = [
        f"{output}: {result.manifest.model.architecture}, {target.precision}, "
        f"{target.weight_bytes / 1e6:.0f} MB of weights",
        *(f"{t.name}: {t.precision}, {t.weight_bytes / 1e6:.0f} MB of weights" for t in more),
        f"KV cache {target.kv_cache.dtype}, {target.kv_cache.bytes_per_token:,} bytes a token",
    ]
    if (cache := result.kv_fidelity) is not None:
        kind = "INT4" if target.kv_cache.dtype == "int4" else "INT8"
        kept = "adds" if target.kv_cache.dtype != "float32" else "would add"
        lines.append(f"an {kind} KV cache {kept} {cache.mean_kl_nats:.4f} nats")
    if (whole := result.fidelity) is not None:
        lines.append(
            f"{whole.mean_kl_nats:.4f} nats from the FP32 model (99th percentile "
            f"{whole.p99_kl_nats:.3f}), perplexity {whole.perplexity_change:+.2%}, "
            f"{whole.top1_agreement:.1%} of tokens agree"
        )
    return "\n".join(lines)


def _encoder_summary(output: Path, result: EncoderExport) -> str:
    target, model, pooling = (
        result.manifest.targets[0],
        result.manifest.model,
        result.manifest.pooling,
    )
    stated = "" if pooling.stated else " (the checkpoint states none)"
    lines = [
        f"{output}: {model.architecture} encoder, {target.precision}, "
        f"{target.weight_bytes / 1e6:.0f} MB of weights",
        f"pooling {pooling.mode}{stated}, {'' if pooling.normalize else 'not '}normalized; "
        f"{model.max_tokens} tokens at most",
    ]
    if (whole := result.fidelity) is not None:
        lines.append(
            f"cosine to the FP32 model {whole.mean_cosine:.4f} (least {whole.min_cosine:.4f}, "
            f"{whole.num_texts} texts)"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
