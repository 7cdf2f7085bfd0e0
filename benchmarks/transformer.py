"""How close does a whole model come to the ideal? `ringspan bench --transformer` on two ranks, as it prints itself.

python benchmarks/transformer.py [--tokens 8192] [--repeats 3] [--write]
"""

import argparse
import subprocess
import sys

from results import describe_machine, write_section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    words = ["bench", "--transformer", "--ranks", "2", "--tokens", str(args.tokens), "--repeats", str(args.repeats)]
    printed = subprocess.run([sys.executable, "-m", "ringspan", *words], check=True, stdout=subprocess.PIPE, text=True)
    text = f"`ringspan {' '.join(words)}`\n\n{describe_machine()}.\n\n```text\n{printed.stdout.rstrip()}\n```"
    print(text)
    if args.write:
        write_section("transformer", "A whole model on two ranks", text)


if __name__ == "__main__":
    main()
