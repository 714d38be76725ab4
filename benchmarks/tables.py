"""What the programs here print, and write with `--output`: tables of rows, with the command and the machine."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from card_blocks_peagle import cell  # noqa: E402
from environment_peagle import command_line  # noqa: E402


def measure_tables(tables: dict[str, Callable[[], Iterator[dict]]], machine: dict, output: str | None):
    """Print the rows of each table as they come, their keys as its head; `machine` is an [`environment`]."""
    if output:
        Path(output).touch()  # what cannot be written should fail before the measurement
    report = {"settings": {"command": command_line()}, "environment": machine, "tables": {}}
    print(json.dumps(machine))
    for name, measure in tables.items():
        rows = report["tables"][name] = []
        for row in measure():
            if not rows:
                print("", name, "  ".join(row), sep="\n")
            print("  ".join(f"{cell(value):>{len(head)}}" for head, value in row.items()))
            rows.append(row)
    if output:
        Path(output).write_text(json.dumps(report, indent=2) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """With `--output`, for the programs to add their own arguments to."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="JSON file for the tables, the command and the machine")
    return parser
