"""How close does a whole model come to the ideal? `ringspan bench model` on two ranks, with its own output.

It uses the default small decoder, with as many KV heads as heads, and with one KV head for all four heads.

    python benchmarks/transformer.py [--kv-heads 4 1] [--tokens 8192] [--repeats 3] [--write]
"""

import argparse
import subprocess
import sys

from results import describe_machine, write_section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    for kv_heads in args.kv_heads:
        text = measure(kv_heads, args.tokens, args.repeats)
        print(text)
        if args.write:
            write_section(f"transformer {kv_heads}", f"A whole model on two ranks, 4 heads over {kv_heads}", text)


def measure(kv_heads: int, tokens: int, repeats: int) -> str:
    sizes = {"ranks": 2, "heads": 4, "kv-heads": kv_heads, "tokens": tokens, "repeats": repeats}
    words = ["bench", "model", *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]
    done = subprocess.run([sys.executable, "-m", "ringspan", *words], check=True, stdout=subprocess.PIPE, text=True)
    return f"`ringspan {' '.join(words)}`\n\n{describe_machine()}.\n\n```text\n{done.stdout.rstrip()}\n```"


if __name__ == "__main__":
    main()
