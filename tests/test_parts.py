"""Files carried in parts: whole again, and what is missing or damaged is named."""

import subprocess

import pytest

from benchmarks.parts import bytes_of, join_files, main, sha256, split_file


@pytest.fixture
def carried(tmp_path):
    """A folder with the parts of two files, and the files."""
    files = []
    for name, size in (("a.gguf", 2500), ("b.whl", 1000)):
        files.append(tmp_path / name)
        files[-1].write_bytes(bytes(i * i % 251 for i in range(size)))
        assert all(part.stat().st_size <= 1000 for part in split_file(files[-1], tmp_path / "parts", 1000))
    return tmp_path / "parts", files


def test_files_are_whole_again(carried, tmp_path):
    parts, files = carried
    assert len(list(parts.iterdir())) == 3 + 1 + 2
    made = join_files(parts, tmp_path / "out")
    assert [file.read_bytes() for file in made] == [file.read_bytes() for file in files]
    for part in parts.glob("*.0*"):  # no longer needed
        part.unlink()
    stamps = [file.stat().st_mtime_ns for file in made]
    assert [file.stat().st_mtime_ns for file in join_files(parts, tmp_path / "out")] == stamps
    made[0].write_bytes(b"cut short")
    with pytest.raises(ValueError, match="a.gguf.000 is missing, a.gguf.001 is missing, a.gguf.002 is missing"):
        join_files(parts, tmp_path / "out")


def test_what_is_missing_or_damaged_is_named_and_nothing_is_joined(carried, tmp_path):
    parts, _ = carried
    (parts / "a.gguf.002").unlink()
    damaged = bytearray((parts / "a.gguf.001").read_bytes())
    damaged[500] ^= 1
    (parts / "a.gguf.001").write_bytes(damaged)
    with pytest.raises(ValueError) as caught:
        join_files(parts, tmp_path / "out")
    assert "a.gguf.001 is damaged, a.gguf.002 is missing: carry" in str(caught.value)
    assert "000" not in str(caught.value) and "b.whl" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="no list of parts"):
        join_files(tmp_path, tmp_path / "out")


def test_parts_in_the_wrong_order_are_no_file(carried, tmp_path):
    parts, _ = carried
    path = parts / "a.gguf.sha256"
    whole, first, second, third = path.read_text().splitlines()
    path.write_text("\n".join([whole, second, first, third]) + "\n")
    with pytest.raises(ValueError, match="the parts of a.gguf do not make the file"):
        join_files(parts, tmp_path / "out")


def test_the_command_takes_what_the_usual_tools_make(carried, tmp_path):
    _, (file, _) = carried
    line = "mkdir p && split -b 700 -d -a 3 a.gguf p/a.gguf. && sha256sum a.gguf > list && cd p && "
    line += "sha256sum a.gguf.* >> ../list && mv ../list a.gguf.sha256"
    subprocess.run(line, shell=True, check=True, cwd=tmp_path)
    main(["join", str(tmp_path / "p"), str(tmp_path / "out")])
    assert sha256(tmp_path / "out/a.gguf") == sha256(file)
    main(["split", str(tmp_path / "q"), str(file), "--size", "700"])
    assert (tmp_path / "q/a.gguf.sha256").read_text() == (tmp_path / "p/a.gguf.sha256").read_text()


def test_sizes():
    assert [bytes_of(size) for size in ("15M", "2K", "1G", "77")] == [15 * 2**20, 2048, 2**30, 77]
    for size in ("", "M", "-1M", "0", "1.5M", "15MB"):
        with pytest.raises(ValueError, match="give a number above 0"):
            bytes_of(size)
