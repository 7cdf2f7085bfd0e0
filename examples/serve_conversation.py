"""A document and three questions about it, asked of a server over ranks with the official `openai` client.

    ringspan serve ./SmolLM2-135M-Instruct --ranks 2 &
    pip install openai
    python examples/serve_conversation.py SmolLM2-135M-Instruct report.txt

Prints, for each turn, the time to the first token and how much of the prompt was cached already.
"""

import argparse
import time
from pathlib import Path

from openai import OpenAI

QUESTIONS = ("What is this document about?", "Name its three most important points.", "Which question is left open?")


def main() -> None:
    """Ask, turn after turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the name that ringspan serve printed")
    parser.add_argument("document", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none")  # the client wants one; the server needs none on loopback
    messages = [{"role": "user", "content": f"{args.document.read_text()}\n\n{QUESTIONS[0]}"}]
    for question in QUESTIONS:
        if len(messages) > 1:
            messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": ask(client, args.model, messages)})


def ask(client: OpenAI, model: str, messages: list[dict[str, str]]) -> str:
    """The answer, printed as it comes."""
    start_s, first_s, text = time.perf_counter(), 0.0, ""
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage:
            used = chunk.usage
            cached = used.prompt_tokens_details.cached_tokens
            print(f"\n[first token after {first_s:.2f} s; {cached} of {used.prompt_tokens} prompt tokens reused]\n")
        elif piece := chunk.choices[0].delta.content:
            first_s = first_s or time.perf_counter() - start_s
            text += piece
            print(piece, end="", flush=True)
    return text


if __name__ == "__main__":
    main()
