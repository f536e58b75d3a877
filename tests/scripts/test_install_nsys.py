"""scripts/install_nsys.sh: what it fetches, and what it says where it cannot."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.waiting import is_running, wait_until

if TYPE_CHECKING:
    from conftest import Checkout

SCRIPT = "scripts/install_nsys.sh"
NSYS = """
case "$1" in
  --version) echo "NVIDIA Nsight Systems version 2022.4.2.1-abc" ;;
  profile) touch check.nsys-rep ;;
  export) echo data >check.sqlite ;;
esac
"""
DEBIAN = 'ID=debian\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian GNU/Linux 12"\n'
# Lists one repository, knows the packages, "downloads" what lies in $POOL.
APT_GET = """
echo "apt-get $*" >>"$CALLS"
for word; do case "$word" in *sourcelist=*) list="${word#*sourcelist=}" ;; esac; done
case " $* " in
  *" indextargets "*) echo "http://mirror.invalid/debian/ bookworm main"; echo "http://else.invalid/ other main" ;;
  *" update "*) cp "$list" "$POOL/sources.list" ;;
  *" --print-uris "*) for deb in "$POOL"/nsight-systems*.deb; do echo "'http://mirror.invalid' ${deb##*/} 1"; done ;;
  *" download "*) cp "$POOL"/nsight-systems*.deb . ;;
  *" install "*) cp "$POOL"/lib*.deb "$(sed 's/.*Dir::Cache::archives=//; s/ -o .*//' <<<"$*")" ;;
esac
"""
APT_CACHE = 'printf "Package: nsight-systems\\nVersion: 2022.4.2.1\\nSize: 1000000\\n"'


@pytest.fixture
def bare(checkout: Checkout, tmp_path: Path) -> Checkout:
    """No nsys anywhere, on Debian 12."""
    (tmp_path / "os-release").write_text(DEBIAN)
    checkout.environment |= {
        "NSYS_PREFIX": str(tmp_path / "prefix"),
        "OS_RELEASE": str(tmp_path / "os-release"),
    }
    return checkout


@pytest.fixture
def repository(bare: Checkout, tmp_path: Path) -> Checkout:
    """As ``bare``, with apt and a repository that has packages of nsys, laid out as Debian's are."""
    pool = tmp_path / "pool"
    pool.mkdir()
    bare.environment["POOL"] = str(pool)
    bare.program("apt-get", APT_GET)
    bare.program("apt-cache", APT_CACHE)
    bare.program("dpkg", "echo amd64")
    host = _package(pool, "nsight-systems", "usr/lib/nsight-systems/host-linux-x64/QdstrmImporter", "importer")
    (host / "usr/share/doc/nsight-systems").mkdir(parents=True)
    (host / "usr/share/doc/nsight-systems/huge").write_text("not needed")
    _build(host)
    _build(
        _package(
            pool,
            "nsight-systems-target",
            "usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys",
            f"#!/bin/bash\n{NSYS}",
        )
    )
    _build(_package(pool, "libssh-4", "usr/lib/x86_64-linux-gnu/libssh.so.4", "library"))
    return bare


def _package(pool: Path, name: str, file: str, content: str) -> Path:
    folder = pool / name
    (folder / "DEBIAN").mkdir(parents=True)
    (folder / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: amd64\nMaintainer: no one <none@example.org>\nDescription: none\n"
    )
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_text(content)
    (folder / file).chmod(0o755)
    (folder / "DEBIAN").chmod(0o755)  # dpkg-deb takes no other mode, as a umask of 077 would give
    return folder


def _build(folder: Path) -> None:
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", folder, folder.with_name(f"{folder.name}_1_amd64.deb")],
        check=True,
        capture_output=True,
    )
    shutil.rmtree(folder)


def test_fetching_can_be_forbidden(bare: Checkout) -> None:
    done = bare.run(SCRIPT, NSYS_FETCH="0")
    assert (done.returncode, done.stdout) == (1, "")
    assert "NSYS_FETCH=0" in done.stderr
    assert "PROFILER=kineto" in done.stderr


def test_fetches_lays_out_and_leaves_nothing_else(repository: Checkout, tmp_path: Path) -> None:
    done = repository.run(SCRIPT)
    prefix = tmp_path / "prefix"
    assert (done.stdout, done.returncode) == (f"{prefix}/bin/nsys\n", 0), done.stderr
    assert sorted(path.name for path in prefix.iterdir()) == ["bin", "lock", "nsight-systems"]
    host, target = prefix / "nsight-systems/host-linux-x64", prefix / "nsight-systems/target-linux-x64"
    assert (host / "QdstrmImporter").exists()
    assert (host / "libssh.so").resolve() == host / "libssh.so.4"
    assert (prefix / "bin/nsys").resolve() == target / "nsys"
    assert not list(prefix.rglob("huge"))
    sources = (tmp_path / "pool/sources.list").read_text()
    assert sources.rstrip().endswith("http://mirror.invalid/debian/ bookworm main contrib non-free")
    assert "else.invalid" not in sources  # another's repository has no nsys
    calls = len(repository.calls)
    assert repository.run(SCRIPT).stdout == f"{prefix}/bin/nsys\n"
    assert len(repository.calls) == calls


def test_apt_is_given_folders_of_its_own(repository: Checkout) -> None:
    repository.run(SCRIPT)
    calls = [call for call in repository.calls if "indextargets" not in call]
    assert calls
    for option in ("Dir::State::lists=", "Dir::Cache=", "Dir::Etc::sourcelist=", "Dir::Etc::sourceparts=-"):
        assert all(option in call for call in calls)


def test_two_at_once_fetch_once(repository: Checkout, tmp_path: Path) -> None:
    both = [
        subprocess.Popen(
            ["bash", str(repository.root / SCRIPT)],
            env=repository.full_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [sample.communicate()[0] for sample in both] == [f"{tmp_path}/prefix/bin/nsys\n"] * 2
    assert sum(" update" in call for call in repository.calls) == 1


def test_says_that_there_is_no_network(repository: Checkout, tmp_path: Path) -> None:
    no_route = 'echo "W: Failed to fetch http://mirror.invalid  Temporary failure resolving"'
    repository.program("apt-get", f'[[ "$*" != *update* ]] || {{ {no_route}; exit 0; }}\n{APT_GET}')
    repository.program("apt-cache", "exit 100")
    done = repository.run(SCRIPT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "reaches no repository (W: Failed to fetch http://mirror.invalid" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list((tmp_path / "prefix").glob("partial*"))


def test_gives_up_where_no_repository_answers(repository: Checkout) -> None:
    repository.program("timeout", '[ "$1" != 60 ] || { echo "$*" >>"$CALLS" && exit 124; }; shift; exec "$@"')
    done = repository.run(SCRIPT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("install_nsys: nsys cannot be fetched, no repository answered within 60 s: connect")
    (limited,) = (call for call in repository.calls if call.startswith("60 "))
    assert limited.startswith("60 apt-get -qq")
    assert limited.endswith(" update")


def test_goes_on_where_the_network_is_slow(repository: Checkout, tmp_path: Path) -> None:
    """At 100 kB/s the lists of Debian take 97 s, and it was said that no repository had answered."""
    arrived = f'for folder in "{tmp_path}"/prefix/partial.*/lists; do echo list >"$folder/Packages"; done'
    repository.program("timeout", f'case "$1" in 60) {arrived}; exit 124 ;; -k) shift 3 ;; *) shift ;; esac; exec "$@"')
    done = repository.run(SCRIPT)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/prefix/bin/nsys\n"), done.stderr
    assert "install_nsys: the network is slow, going on" in done.stderr


def test_complaints_of_apt_are_not_translated(repository: Checkout) -> None:
    """On a German machine a missing network was told as a missing package."""
    german, english = "Temporärer Fehlschlag beim Auflösen", "Temporary failure resolving"
    said = f'case "${{LANGUAGE-}}$LC_ALL" in C*) echo "W: {english}" ;; *) echo "W: {german}" ;; esac'
    repository.program("apt-get", f'[[ "$*" != *update* ]] || {{ {said}; exit 0; }}\n{APT_GET}')
    repository.program("apt-cache", "exit 100")
    done = repository.run(SCRIPT, LC_ALL="de_DE.UTF-8", LANGUAGE="de")
    assert f"apt reaches no repository (W: {english})" in done.stderr


def test_says_that_there_is_no_such_package(repository: Checkout) -> None:
    repository.program("apt-cache", "exit 100")
    assert "debian bookworm has no package nsight-systems for amd64" in repository.run(SCRIPT).stderr


@pytest.mark.parametrize(
    ("program", "body", "reason"),
    [
        ("dpkg", "echo riscv64", "there are no packages of nsys for riscv64"),
        ("apt-get", "exit 0", "apt has no repository of debian bookworm configured"),
    ],
)
def test_says_what_stands_in_the_way(repository: Checkout, program: str, body: str, reason: str) -> None:
    repository.program(program, body)
    done = repository.run(SCRIPT)
    assert done.returncode == 1
    assert reason in done.stderr


def test_says_that_this_is_no_debian(bare: Checkout, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "sort", "rm", "cat"):
        (tools / name).symlink_to(shutil.which(name) or "")
    bare.path = str(tools)
    done = bare.run(SCRIPT)
    assert done.returncode == 1
    assert "without apt-get there are no packages to fetch" in done.stderr


def test_what_does_not_record_is_not_installed(repository: Checkout, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    (pool / "nsight-systems-target_1_amd64.deb").unlink()
    broken = NSYS.replace("touch check.nsys-rep", 'echo "The importer binary was not found" && exit 1')
    _build(
        _package(
            pool,
            "nsight-systems-target",
            "usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys",
            f"#!/bin/bash\n{broken}",
        )
    )
    done = repository.run(SCRIPT)
    assert done.returncode == 1
    assert "does not record here (The importer binary was not found)" in done.stderr
    assert not (tmp_path / "prefix/bin").exists()
    assert not list((tmp_path / "prefix").glob("partial*"))


def _replace_nsys(pool: Path, body: str) -> None:
    (pool / "nsight-systems-target_1_amd64.deb").unlink()
    file = "usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys"
    _build(_package(pool, "nsight-systems-target", file, f"#!/bin/bash\n{body}"))


LOST_RACE = "echo '[boost::errinfo_api_function_*] = sem_open'; exit 1"


def test_an_nsys_that_lost_a_race_with_itself_records_again(repository: Checkout, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    lost = f'echo start >>"{starts}"; [ "$(wc -l <"{starts}")" -gt 2 ] || {{ {LOST_RACE}; }}'
    _replace_nsys(tmp_path / "pool", NSYS.replace("touch check.nsys-rep", f"{lost}; touch check.nsys-rep"))
    done = repository.run(SCRIPT)
    assert (done.stdout, done.returncode) == (f"{tmp_path}/prefix/bin/nsys\n", 0), done.stderr
    assert len(starts.read_text().splitlines()) == 3


def test_an_agent_that_nsys_leaves_holds_up_nobody(repository: Checkout, tmp_path: Path) -> None:
    """The next run waited for its lock without end."""
    repository.program("sleep", "")
    path = tmp_path / "pids"
    left = f'setsid tail -f /dev/null >/dev/null 2>&1 & echo "$!" >>"{path}"; {LOST_RACE}'
    _replace_nsys(tmp_path / "pool", NSYS.replace("touch check.nsys-rep", left))
    done = repository.run(SCRIPT)
    assert done.returncode == 1
    assert "does not record here (8 times; [boost::errinfo_api_function_*] = sem_open): install" in done.stderr
    _replace_nsys(tmp_path / "pool", NSYS)
    done = repository.run(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "waiting for it" not in done.stderr
    pids = path.read_text().split()
    assert len(pids) == 8
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids))


def test_broken_download_is_thrown_away(repository: Checkout, tmp_path: Path) -> None:
    (tmp_path / "pool/nsight-systems_1_amd64.deb").write_text("half")
    done = repository.run(SCRIPT)
    assert done.returncode == 1
    assert "what was downloaded is broken" in done.stderr
    assert not (tmp_path / "prefix/downloads").exists()


def test_what_another_version_left_is_not_unpacked_with_this_one(repository: Checkout, tmp_path: Path) -> None:
    """A run whose nsys did not record left its packages: the next one, of another release, recorded with both."""
    old = _package(
        tmp_path / "pool", "old", "usr/lib/nsight-systems/target-linux-x64/libToolsInjection64.so", "of 2021"
    )
    _build(old)
    downloads = tmp_path / "prefix/downloads"
    downloads.mkdir(parents=True)
    (tmp_path / "pool/old_1_amd64.deb").rename(downloads / "nsight-systems-target_0_amd64.deb")
    assert repository.run(SCRIPT).returncode == 0
    assert not list((tmp_path / "prefix").rglob("libToolsInjection64.so"))


def test_another_release_can_be_named(repository: Checkout, tmp_path: Path) -> None:
    depends = "libarrow500 (= 0~~12.5), libssh-4, qt6-private-abi (= 6.8), nsight-systems-target (= 2)"
    repository.program("apt-cache", f'printf "Package: x\\nVersion: 2\\nDepends: {depends}\\nSize: 1000000\\n"')
    done = repository.run(SCRIPT, NSYS_RELEASE="experimental")
    assert done.returncode == 0, done.stderr
    sources = (tmp_path / "pool/sources.list").read_text().splitlines()
    assert [line.split()[-4] for line in sources] == ["bookworm", "experimental"]
    (download,) = [call for call in repository.calls if " download " in call and " --print-uris " not in call]
    # Of the same build are its own libraries; all else is the system's.
    assert download.split(" download ")[1].split() == [
        f"{name}/experimental" for name in ("libarrow500", "nsight-systems", "nsight-systems-target")
    ]
    assert "from debian experimental" in done.stderr


def test_a_system_whose_nsys_is_too_old_gets_that_of_the_next_one(repository: Checkout, tmp_path: Path) -> None:
    """That of Ubuntu 22.04 writes .qdrep files: it recorded nothing that was found."""
    (tmp_path / "os-release").write_text("ID=ubuntu\nVERSION_CODENAME=jammy\nUBUNTU_CODENAME=jammy\n")
    repository.program("apt-get", APT_GET.replace("debian/ bookworm", "ubuntu/ jammy"))
    done = repository.run(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "from ubuntu noble" in done.stderr
    sources = (tmp_path / "pool/sources.list").read_text().splitlines()
    assert [line.split()[-5] for line in sources] == ["jammy", "noble"]


@pytest.fixture
def packed(repository: Checkout, tmp_path: Path) -> Path:
    """An archive of what the repository has, with an importer that is a program of the machine."""
    nsight = tmp_path / "prefix/nsight-systems"
    assert repository.run(SCRIPT).returncode == 0
    shutil.copy("/bin/true", nsight / "host-linux-x64/QdstrmImporter")
    (nsight / "host-linux-x64/libQt6Gui.so").write_text("not needed")
    for name in ("libcupti.so.11.8", "libcupti.so.12.5", "libnvperf_grfx_host.so"):
        (nsight / "target-linux-x64" / name).write_text(name)
    done = repository.run(SCRIPT, "--pack", str(tmp_path / "nsys.tar.gz"))
    assert done.returncode == 0, done.stderr
    return tmp_path / "nsys.tar.gz"


def test_what_was_changed_on_its_way_is_refused(repository: Checkout, packed: Path, tmp_path: Path) -> None:
    checked = subprocess.run(
        ["sha256sum", "-c", f"{packed.name}.sha256"], cwd=tmp_path, capture_output=True, check=False
    )
    assert checked.returncode == 0, "it is what sha256sum writes"
    with packed.open("ab") as file:
        file.write(b"more")
    done = repository.run(SCRIPT, NSYS_ARCHIVE=str(packed), NSYS_PREFIX=str(tmp_path / "elsewhere"))
    assert (done.returncode, done.stdout) == (1, "")
    reason = f"does not have the checksum in {packed}.sha256: copy both again"
    assert done.stderr == f"install_nsys: NSYS_ARCHIVE={packed} {reason}\n"


def test_what_is_packed_is_taken_where_there_is_no_network(repository: Checkout, packed: Path, tmp_path: Path) -> None:
    repository.program("nsys", NSYS)  # one on PATH does not hide what the user brings
    repository.program("apt-get", "exit 1")
    calls = len(repository.calls)
    elsewhere = tmp_path / "elsewhere"
    for _ in range(2):
        done = repository.run(SCRIPT, NSYS_ARCHIVE=str(packed), NSYS_PREFIX=str(elsewhere))
        assert (done.stdout, done.returncode) == (f"{elsewhere}/bin/nsys\n", 0), done.stderr
    assert len(repository.calls) == calls
    files = {path.name for path in (elsewhere / "nsight-systems").rglob("*") if path.is_file()}
    assert files == {"nsys", "libcupti.so.12.5", "libssh.so.4", "QdstrmImporter"}


@pytest.mark.parametrize(
    ("content", "checksum_of", "reason"),
    [
        (None, None, "cannot be read"),
        ("half", None, "has no checksum beside it: copy "),
        ("half", "whole", "does not have the checksum in "),
        ("half", "half", "cannot be unpacked"),
    ],
)
def test_a_broken_archive_is_refused(
    repository: Checkout, tmp_path: Path, content: str | None, checksum_of: str | None, reason: str
) -> None:
    archive = tmp_path / "nsys.tar.gz"
    if content:
        archive.write_text(content)
    if checksum_of:
        digest = hashlib.sha256(checksum_of.encode()).hexdigest()
        (tmp_path / "nsys.tar.gz.sha256").write_text(f"{digest}  nsys.tar.gz\n")
    done = repository.run(SCRIPT, NSYS_ARCHIVE=str(archive))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"install_nsys: NSYS_ARCHIVE={archive} {reason}")
    assert not (tmp_path / "prefix/bin").exists()
