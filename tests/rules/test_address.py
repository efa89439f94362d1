"""Where the package says who publishes it: one address, one version, and what they still stand for."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

from experiments.lab.site.address import PLACEHOLDER, addressed, owner

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_every_file_has_the_address_of_pyproject():
    texts = addressed(ROOT)
    assert {ROOT / "CITATION.cff", ROOT / "notebooks" / "quickstart.ipynb"} <= texts.keys()
    for file, text in texts.items():
        assert file.read_text(encoding="utf-8") == text, f"{file}: run python -m experiments.lab.site docs --tables"
    assert CITATION["repository-code"] == PROJECT["urls"]["Repository"]


def test_the_address_is_no_placeholder():
    if owner(ROOT) == PLACEHOLDER:
        files = ", ".join(str(file.relative_to(ROOT)) for file in [ROOT / "pyproject.toml", *addressed(ROOT)])
        pytest.skip(f"the repository's address is still a placeholder, {PROJECT['urls']['Repository']}, in {files}")


def test_the_address_of_another_owner_goes_everywhere(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/someone-else/kvjax"\n')
    texts = {"README.md": "see https://github.com/OWNER/kvjax.", "notebooks/a.ipynb": "x/github/OWNER/kvjax/blob/main",
             "notes.md": "https://github.com/NVIDIA/kvpress"}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    made = {file.name: text for file, text in addressed(tmp_path).items()}
    assert made == {"README.md": "see https://github.com/someone-else/kvjax.",
                    "a.ipynb": "x/github/someone-else/kvjax/blob/main"}  # fmt: skip
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://elsewhere.org/kvjax"\n')
    with pytest.raises(ValueError, match="expected https://github.com/OWNER/kvjax as Repository, got 'https://elsewhere"):
        owner(tmp_path)


def test_the_citation_is_of_this_version_and_licence():
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys() and CITATION["cff-version"] == "1.2.0"
    assert (str(CITATION["version"]), CITATION["license"]) == (PROJECT["version"], PROJECT["license"])


def test_tags_are_versions_with_a_part_in_the_changelog():
    """A release is a tag v and the version of pyproject.toml, under which CHANGELOG.md says what is new."""
    told = re.findall(r"^## (\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = subprocess.run(["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert {tag.removeprefix("v") for tag in listed.stdout.split()} <= set(told)
    assert PROJECT["version"] in told or "There is no release yet." in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_package_can_be_found_by_what_it_does():
    assert {"KV cache", "JAX", "kvpress"} <= set(PROJECT["keywords"])
    assert "Typing :: Typed" in PROJECT["classifiers"] and not any("License" in x for x in PROJECT["classifiers"])
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in PROJECT["classifiers"]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert json.loads(path.read_text(encoding="utf-8"))["metadata"]["kernelspec"]["name"] == "python3"


def test_read_the_docs_builds_what_the_tests_build():
    made = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    assert made["version"] == 2 and made["sphinx"] == {"configuration": "docs/conf.py", "fail_on_warning": True}
    (install,) = made["python"]["install"]
    assert set(install["extra_requirements"]) <= PROJECT["optional-dependencies"].keys()
    assert made["build"]["tools"]["python"] == PROJECT["requires-python"].removeprefix(">=")
