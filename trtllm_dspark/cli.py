"""The command `trtllm-dspark`. Bad input is one line on stderr and exit code 2; a traceback is a bug."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.version import __version__

# command -> module in trtllm_dspark.commands
COMMANDS = {
    "generate": "generate",
    "eval": "evaluate",
    "inspect": "inspect",
    "budget": "budget",
    "kernels": "kernels",
    "doctor": "doctor",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn a user's error into one line. Returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return import_module(f"trtllm_dspark.commands.{COMMANDS[arguments.command]}").run(arguments)
    except (DSparkError, ImportError, OSError) as error:
        print(f"trtllm-dspark: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trtllm-dspark: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Every command and option. Needs no torch."""
    parser = argparse.ArgumentParser(prog="trtllm-dspark", description="The DSpark drafter on one machine.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="stream text, accepted drafts marked, and say how it went")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="text; default: code of the standard library")
    generate.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a text file")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    generate.add_argument("--no-spec", action="store_true", help="the target alone")
    generate.add_argument("--compare", action="store_true", help="also run the target alone: same text? how much faster?")
    generate.add_argument("--repeats", type=_positive, default=5, metavar="N", help="timed runs of --compare (default 5)")
    _model_options(generate)

    evaluate = commands.add_parser("eval", help="acceptance over many prompts")
    evaluate.add_argument("--prompts", type=_positive, default=24, metavar="N", help="how many (default 24)")
    evaluate.add_argument("--prompt-tokens", type=_positive, default=128, metavar="N", help="length of each (default 128)")
    evaluate.add_argument("--prompts-file", metavar="FILE", help="own prompts, one JSON string a line")
    evaluate.add_argument("--batch", type=_positive, default=1, metavar="N", help="requests at once (default 1)")
    evaluate.add_argument("--repeats", type=_positive, default=1, metavar="N", help="timed passes (default 1)")
    evaluate.add_argument("--no-baseline", action="store_true", help="do not run the target alone: no check, no speed")
    evaluate.add_argument("--multi-turn", action="store_true", help="conversations, with prefix reuse off, on and at fault")
    evaluate.add_argument("--turns", type=_positive, default=5, metavar="N", help="of each conversation (default 5)")
    evaluate.add_argument("--json", metavar="FILE", help="write every figure here")
    _model_options(evaluate)

    inspect = commands.add_parser("inspect", help="what a draft checkpoint is, costs, and lacks")
    inspect.add_argument("draft_folder", nargs="?", metavar="DRAFT", help="folder or safetensors file; default: the tiny pair")
    inspect.add_argument("--json", action="store_true", help="print JSON")

    budget = commands.add_parser("budget", help="how many tokens fit beside the draft's own KV pool")
    budget.add_argument("--draft", metavar="PATH", help="folder or safetensors file; default: the tiny pair")
    budget.add_argument("--target-bytes-per-token", type=int, required=True, metavar="N", help="target KV, of one rank")
    budget.add_argument("--target-state-gib", type=float, default=0.0, metavar="X", help="whatever the tokens (default 0)")
    total = budget.add_mutually_exclusive_group(required=True)
    total.add_argument("--total-gib", type=float, metavar="G", help="for both pools of one rank, decimals allowed")
    total.add_argument("--total-bytes", type=int, metavar="N", help="the same in bytes")
    budget.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallelism (default 1)")
    budget.add_argument("--attention-dp", action="store_true", help="each rank has its own requests, attention unsharded")
    budget.add_argument("--ranks", type=int, metavar="N", help="all ranks; default: as many as --tp")
    budget.add_argument("--page-size", type=int, default=64, metavar="P", help="tokens a page (default 64)")
    budget.add_argument("--draft-dtype", metavar="NAME", help="of the draft's pool, e.g. bfloat16; default: the checkpoint's")
    budget.add_argument("--host-gib", type=float, metavar="H", help="a host tier of one rank, for pages of both pools")
    budget.add_argument("--plot", metavar="FILE.png", help="draw the comparison; needs matplotlib")
    budget.add_argument("--json", action="store_true", help="print JSON")

    kernels = commands.add_parser("kernels", help="compile kernels ahead of time")
    actions = kernels.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="write loadable kernels into a folder; no GPU needed")
    build.add_argument("--arch", required=True, metavar="NAMES", help="such as sm_90a,sm_100a")
    build.add_argument("--out", required=True, metavar="DIR", help="the folder; name it in CUTE_KERNELS_AOT_DIR to use it")
    build.add_argument("--draft", metavar="PATH", help="folder or safetensors file; default: the tiny pair")
    build.add_argument("--page-size", default="64", metavar="P", help="tokens a page, such as 32,64 (default 64)")
    build.add_argument("--dtype", metavar="NAME", help="bfloat16 or float16; default: the checkpoint's")
    build.add_argument("--jobs", type=_positive, metavar="N", help="processes; default: one a core")

    doctor = commands.add_parser("doctor", help="what happens with the TensorRT-LLM of this machine, or with a serving YAML")
    doctor.add_argument("--config", metavar="FILE", help="check this YAML instead; tensorrt_llm is not imported")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--target", metavar="DIR", help="Hugging Face folder; default: the tiny pair")
    group.add_argument("--draft", metavar="DIR", help="DSpark draft folder; default: the tiny pair")
    group.add_argument("--num-drafts", type=_positive, metavar="K", help="drafts a step; default: the checkpoint's block")
    group.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N", help="default 128")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the target's end-of-sequence ids")
    group.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 (default auto)")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto: float32 on a CPU, the checkpoint's own on a GPU",
    )
    group.add_argument(
        "--draft-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the draft; default: the target's",
    )
    group.add_argument("--attention-backend", default="AUTO", metavar="NAME", help="AUTO, CUTEDSL, TRTLLM or VANILLA")
    group.add_argument("--page-size", type=_positive, default=64, metavar="P", help="tokens a page (default 64)")
    group.add_argument("--pool-tokens", type=_positive, default=16384, metavar="N", help="of the draft pool (default 16384)")
    group.add_argument("--rope-theta", type=float, metavar="X", help="override the checkpoint's, to measure it")
    group.add_argument("--aux-stream", choices=("prefix", "attn_res"), help="override the checkpoint's")
    group.add_argument("--threads", type=_positive, metavar="N", help="CPU threads of torch; default: 1 for a small target")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, it is {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
