"""The documentation: it builds without a warning, its links resolve, and its snippets run.

Python blocks of a page run one after another in one namespace, and its shell lines in one folder, in which a TOML block is
the file that its first line names. A block that cannot run here says why in a comment before it, `<!-- not run: ... -->`,
but its flags are still checked.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from skirl.cli import COMMANDS, main
from skirl.core import optim
from skirl.oracle import policies
from skirl.tools.flags import Composed, flags_of, option

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.+?) -->\n+)?```(?P<kind>python|sh|toml)\n(?P<code>.*?)```", re.DOTALL)
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "benchmarks" / "README.md"])
MEASUREMENTS = {"benchmarks.md", "performance.md"}
"""Pages whose commands run for minutes, as they say: the commands are checked, but not run."""


@dataclass
class Block:
    kind: str
    code: str
    runs: bool


def blocks_of(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text())
    return [Block(m["kind"], m["code"], m["why"] is None and page.name not in MEASUREMENTS) for m in found]


def test_every_fence_is_known():
    """A fence that the pattern misses would be a snippet that nobody runs."""
    for page in PAGES:
        fences = re.findall(r"^```(\w+)", page.read_text(), re.MULTILINE)
        assert set(fences) <= {"python", "sh", "text", "toml", "json", "diff"}, page
        assert sum(kind in ("python", "sh", "toml") for kind in fences) == len(blocks_of(page)), page


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.runs for b in blocks_of(p))], ids=lambda p: p.stem)
@pytest.mark.usefixtures("python")
def test_snippets_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for home, name in ((policies, "POLICIES"), (optim, "ROW_OPTIMIZERS")):  # a page may add its own
        monkeypatch.setattr(home, name, dict(getattr(home, name)))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page) * (2 if page.stem == "tutorial" else 1):  # who tries it may do so again
        if not block.runs:
            continue
        if block.kind == "python":
            exec(compile(block.code, f"{page.name}", "exec"), namespace)
            continue
        if block.kind == "toml":
            if named := re.match(r"# (\S+\.toml)\n", block.code):
                (tmp_path / named[1]).write_text(block.code)
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["skirl"]:  # in this process: importing torch takes longer than most of these commands
                assert main(words[1:]) == 0, f"{line}\n{''.join(capsys.readouterr())}"
            elif words:
                subprocess.run(["bash", "-e", "-c", line], check=True, timeout=200)
    if page.stem == "tutorial":
        printed, shown = capsys.readouterr().out, re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL)
        lines = {alike(line) for line in printed.splitlines()}
        assert [line for block in shown for line in block.splitlines() if alike(line) not in lines] == []


def alike(line: str) -> str:
    """Return a line without its title, and without its fractions, which differ between processors."""
    return " ".join(re.sub(r"\d+\.\d+", "#", re.sub(r"^\s*cache(?=  )", "", line)).split())


def test_the_design_has_every_folder():
    tree = re.search(r"```text\nsrc/skirl/\n(.*?)```", (DOCS / "design.md").read_text(), re.DOTALL)
    assert tree
    listed = set(re.findall(r"^[│├└─ ]*(\w+)/ ", tree[1], re.MULTILINE))
    house = ROOT / "src" / "skirl"
    rooms = {file.parent.name for file in house.rglob("__init__.py") if file.parent != house}
    shown = {name for name in listed if not (ROOT / name).is_dir()}
    assert shown <= rooms and {room.parent.name for room in house.glob("*/__init__.py")} - {"cli"} <= listed
    assert {name for name in listed if (ROOT / name).is_dir()} == {"benchmarks", "docs", "dev", "examples", "tests"}


def test_the_index_and_the_menu_show_every_page():
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", (DOCS / "index.md").read_text()))
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) - {"index.md"}
    assert linked == listed == pages


def commands() -> list[tuple[str, str]]:
    """Return every line of a page that calls skirl, whether it runs or not."""
    lines = []
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for block in BLOCK.finditer(page.read_text()):
            if block["kind"] != "sh":
                continue
            code = block["code"].replace("\\\n", " ")
            lines += [(page.name, line.strip()) for line in code.splitlines() if re.match(r"\s*skirl ", line)]
    return lines


@pytest.mark.parametrize(("page", "line"), commands())
def test_flags_exist(page, line):
    launch, _, launched = line.partition(" -- ")
    if launched:  # trainers run another skirl command, or a script
        test_flags_exist(page, launch)
        line = launch if ".py" in launched else f"skirl {launched}"
    words = line.split("#")[0].split()[1:]
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    assert name, f"{page}: skirl {words[0]} is no command"
    module, _, owner = COMMANDS[name][0].partition(":")
    kind = getattr(import_module(module), owner)
    known = [option(name).removeprefix("--") for name in flags_of(kind)]
    known += ["config"] if issubclass(kind, Composed) else []
    for flag in re.findall(r"(?<!\S)--([a-z-]+)", line):
        assert flag in known, f"{page}: skirl {name} has no flag --{flag}"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors on a page that a link may use: its headings, as the site names them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    plain = [
        re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path):
    """Links within the site. `make docs` builds it, which takes 20 s."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file() and target.is_relative_to(DOCS), f"{link}: there is no such file in docs"
        assert not anchor or anchor in anchors_of(target), f"{link}: there is no such heading"


@pytest.mark.slow  # continuous integration runs `make docs`
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the site is not built without mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in import_module("skirl").__all__:
        assert re.search(rf'id="skirl\.([a-z]+\.)?{name}"', api), f"{name} is public and not in docs/api.md"
