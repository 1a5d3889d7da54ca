"""Every error has a code of its own, a section in docs/errors.md, and survives pickling."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from anygauge_hooks import errors
from anygauge_hooks.errors import AnygaugeError

CLASSES: list[type[AnygaugeError]] = [getattr(errors, name) for name in errors.__all__]


def test_every_error_class_is_exported() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(errors.__all__) == defined


def test_codes_are_unique() -> None:
    codes = [cls.__dict__["code"] for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"AG\d{3}", code) for code in codes)


def test_the_document_has_one_section_per_code_in_order(root: Path) -> None:
    parts = re.split(r"^## (.+)$", (root / "docs/errors.md").read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(sections) == sorted(cls.code for cls in CLASSES)
    for cls in CLASSES:
        assert sections[cls.code].lstrip().startswith(f"`{cls.__name__}`: ")
        assert cls is AnygaugeError or "```text\n" in sections[cls.code], f"{cls.code}: show how it reads"


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling(cls: type[AnygaugeError]) -> None:
    error = pickle.loads(pickle.dumps(cls("What was found.", hint="What to do.")))
    assert type(error) is cls
    assert str(error) == f"What was found.\n  What to do.\n  [{cls.code}]"
    assert error.hint == "What to do."
