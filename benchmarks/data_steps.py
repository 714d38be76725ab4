"""Cost of the data steps, on one thread: `python benchmarks/data_steps.py [chats.jsonl ...] [--output file.json]`.

Without files it makes its own chats. For each file and block length: the time of plain batched tokenisation of the same
text, and, as multiples of it, what encoding adds to that (rendering the template, the mask), windows, and packing. Then
memory and time of the whole command from 1,000 to 100,000 chats, and extraction against the target's bare forward.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path


os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tables import measure_tables, parser  # noqa: E402

from data.chat_template import encode_conversation  # noqa: E402
from data.collator import packed_row  # noqa: E402
from data.conversations import BadConversation, read_rows  # noqa: E402
from data.sequence_packing import pack_windows  # noqa: E402
from data.target_signals import target_signals  # noqa: E402
from data.windows import split_sample  # noqa: E402
from environment_peagle import environment  # noqa: E402
from target_peagle import load_target, load_tokenizer  # noqa: E402


WORDS = "the tide at harbour rises before noon and ships with deep draught wait for a pilot near green buoys".split()
MEASURED = "import resource, sys; from data.sequence_packing import main; main(sys.argv[1:]); "
MEASURED += "print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)"


def make_chats(path: Path, count: int, turns: int, longest: int) -> Path:
    """Chats of random words: ``turns`` questions and answers of up to ``longest`` words, behind a system prompt."""
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            messages = [{"role": "system", "content": "You are a pilot. " + " ".join(rng.choices(WORDS, k=40))}]
            for _ in range(turns):
                for role in ("user", "assistant"):
                    text = f"{number} " + " ".join(rng.choices(WORDS, k=rng.randint(5, longest)))
                    messages.append({"role": role, "content": text})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def fastest(function, prepare=lambda: None, repeats: int = 3) -> float:
    """Seconds of CPU time that ``function`` takes of what ``prepare`` returns, in the fastest of some runs."""
    times = []
    for _ in range(repeats):
        prepared = prepare()
        start = time.process_time()
        function(prepared)
        times.append(time.process_time() - start)
    return min(times)


def steps(path: Path, tokenizer, lengths: list[int]) -> Iterator[dict]:
    """One row for each block length that the chats fit."""
    rows = [row for _, row in read_rows(path)]
    samples = [encode_conversation(row, tokenizer)[0][0] for row in rows]
    texts = [sample.chat.text for sample in samples]
    tokens = sum(len(sample.input_ids) for sample in samples)

    def encoded(_=None):  # a chat remembers what it rendered, so each run needs new ones
        return [encode_conversation(row, tokenizer)[0][0] for row in rows]

    plain = fastest(lambda _: tokenizer(texts, add_special_tokens=False))
    encode = fastest(encoded) / plain
    chats = {
        "chats": f"{len(rows):,} of {path.name}",
        "tokens": tokens,
        "tokenised in, s": plain,
        "encoding, x of it": encode,
    }
    for length in lengths:
        try:
            windows = [window for sample in samples for window in split_sample(sample, length)]
        except BadConversation as bad:
            print(f"{path.name} in blocks of {length}: {bad}")
            continue

        cut = fastest(lambda new, n=length: [split_sample(sample, n) for sample in new], encoded) / plain
        pack = fastest(lambda _, n=length, w=windows: pack_windows(w, n)) / plain
        blocks = pack_windows(windows, length)
        fill = sum(len(window["input_ids"]) for window in windows) / len(blocks) / length
        yield chats | {"block": length, "windows, x": cut, "packing, x": pack, "fill": f"{fill:.1%}"}


def memory(folder: Path) -> Iterator[dict]:
    for count in (1_000, 10_000, 100_000):
        path = make_chats(folder / f"{count}.jsonl", count, turns=1, longest=120)
        line = ["-c", MEASURED, "--input", path, "--output", folder / f"blocks{count}", "--max_seq_len", "4096"]
        start = time.perf_counter()
        run = subprocess.run([sys.executable, *map(str, line)], cwd=ROOT, capture_output=True, text=True, check=True)
        seconds, peak = time.perf_counter() - start, int(run.stderr.split("PEAK")[-1])
        yield {"chats": count, "s": seconds, "peak, MB": peak, "fill": run.stdout.split("fill ")[1].split()[0]}


@torch.no_grad()
def extraction(folder: Path) -> Iterator[dict]:
    """The forward that extraction makes, with the cast to bfloat16, against a bare one; blocks of 512 in turn."""
    target, tokenizer = load_target()
    path = make_chats(folder / "extract.jsonl", 120, turns=1, longest=120)
    samples = [encode_conversation(row, tokenizer)[0][0] for _, row in read_rows(path)]
    blocks = pack_windows([w for sample in samples for w in split_sample(sample, 512)], 512)
    layer_ids, bare, ours = [2, 15, 27], 0.0, 0.0
    for block in blocks.select(range(8)):
        row = packed_row([block])
        for turn in range(3):
            start = time.perf_counter()
            target(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False, logits_to_keep=1)
            middle = time.perf_counter()
            [signal.to(torch.bfloat16) for signal in target_signals(target, row, layer_ids)]
            if turn:  # the first warms up
                bare, ours = bare + middle - start, ours + time.perf_counter() - middle
    yield {
        "block": 512,
        "bare forward, s": bare / 16,
        "extraction, s": ours / 16,
        "pace of the bare one": f"{bare / ours:.1%}",
    }


def main() -> None:
    torch.set_num_threads(1)
    arguments = parser(__doc__)
    arguments.add_argument("files", nargs="*", type=Path, help="conversations in JSON Lines")
    args, (tokenizer, _) = arguments.parse_args(), load_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)

        def all_steps():
            own = (make_chats(folder / "short chats", 2000, 1, 120), make_chats(folder / "long chats", 60, 20, 200))
            for path in (*args.files, *own):
                yield from steps(path, tokenizer, [512, 2048, 4096])

        tables = {"steps": all_steps, "memory": partial(memory, folder), "extraction": partial(extraction, folder)}
        measure_tables(tables, environment(load_target()[0]), args.output)


if __name__ == "__main__":
    main()
