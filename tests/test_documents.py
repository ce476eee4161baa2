"""Documents that are written from code say what the code says."""

from __future__ import annotations

from tests.settings_doc import FILE, document


def test_configuration_md_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == document(), "run: python -m tests.settings_doc"


def test_every_setting_is_described() -> None:
    rows = [line for line in document().splitlines() if line.startswith("| `")]
    assert len(rows) > 70
    assert [row for row in rows if not row.split("|")[4].strip()] == []
