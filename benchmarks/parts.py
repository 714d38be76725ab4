"""Large files in parts, where only small ones can be carried: `python benchmarks/parts.py split FOLDER FILE ...`, `... join FOLDER OUTPUT`.

Of ``target.gguf`` the folder gets ``target.gguf.000``, ``.001`` and so on, and ``target.gguf.sha256``, which lists the whole
and then its parts, in order; it is what `split -b 15M -d -a 3` and `sha256sum` make, too. The parts may be carried
in any order and in several goes.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path


UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
CHUNK = 2**20


def bytes_of(size: str) -> int:
    """15M, 500K or a number of bytes. Raises ValueError where it is none of these, or not above 0."""
    count = size[: len(size) - (size[-1:] in UNITS)]
    if not count.isdecimal() or not int(count):
        raise ValueError(f"a size of {size!r}: give a number above 0, as 15M, 500K or 1000000")
    return int(count) * UNITS.get(size[-1], 1)


def sha256(*files: Path) -> str:
    """Of the files' contents, one after the other."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                total.update(chunk)
    return total.hexdigest()


def split_file(file: Path, folder: Path, size: int) -> list[Path]:
    """Write ``file`` to ``folder`` in parts of at most ``size`` bytes, and their list; returns the parts."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    with file.open("rb") as stream:
        while (content := stream.read(size)) or not parts:
            parts.append(folder / f"{file.name}.{len(parts):03}")
            parts[-1].write_bytes(content)
    lines = [f"{sha256(file)}  {file.name}"] + [f"{sha256(part)}  {part.name}" for part in parts]
    (folder / f"{file.name}.sha256").write_text("\n".join(lines) + "\n")
    return parts


def join_files(folder: Path, output: Path) -> list[Path]:
    """Every file whose list is in ``folder``, whole, in ``output``; one that is there and right is left alone.

    Raises ValueError: there is no list, or parts are missing or damaged; all of them are named. Nothing is joined then.
    """
    lists, bad, whole = sorted(folder.glob("*.sha256")), [], {}
    if not lists:
        raise ValueError(f"{folder} has no list of parts (*.sha256): make it with python benchmarks/gpu_run.py pack")
    for path in lists:
        (digest, name), *parts = (line.split() for line in path.read_text().splitlines())
        target = output / Path(name).name
        if target.is_file() and sha256(target) == digest:
            continue
        for expected, part in parts:
            if not (folder / part).is_file():
                bad.append(f"{part} is missing")
            elif sha256(folder / part) != expected:
                bad.append(f"{part} is damaged")
        whole[target] = digest, [folder / part for _, part in parts]
    if bad:
        raise ValueError(f"{folder}: {', '.join(bad)}: carry what is named once more")
    output.mkdir(parents=True, exist_ok=True)
    for target, (digest, parts) in whole.items():
        if sha256(*parts) != digest:  # of parts that are each right
            raise ValueError(f"{folder}: the parts of {target.name} do not make the file of its list: pack it again")
        partial = target.with_name(f"{target.name}.partial")
        with partial.open("wb") as stream:
            for part in parts:
                stream.write(part.read_bytes())
        os.replace(partial, target)
    return [output / path.name.removesuffix(".sha256") for path in lists]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Large files in parts, and whole again.")
    commands = parser.add_subparsers(dest="command", required=True)
    split = commands.add_parser("split", help="write the parts of files, and their lists")
    split.add_argument("folder", type=Path, help="for the parts")
    split.add_argument("files", type=Path, nargs="+")
    split.add_argument("--size", type=bytes_of, default="15M", help="of a part at most (%(default)s)")
    join = commands.add_parser("join", help="check the parts and write the files")
    join.add_argument("folder", type=Path, help="of the parts")
    join.add_argument("output", type=Path, help="folder for the files")
    args = parser.parse_args(arguments)
    try:
        if args.command == "split":
            made = [part for file in args.files for part in split_file(file, args.folder, args.size)]
        else:
            made = join_files(args.folder, args.output)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(*made, sep="\n")


if __name__ == "__main__":
    main()
