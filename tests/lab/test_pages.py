"""Marked parts of a page."""

import pytest

from shf.lab.pages import fill, filled, table

PAGE = "first\n<!-- one -->\nold\n<!-- end -->\nbetween\n<!-- two -->\n<!-- end -->\nlast\n"


def test_parts_are_replaced_and_the_rest_is_left():
    page = filled(PAGE, {"one": r"new \1", "two": "2"})
    assert page == (
        "first\n<!-- one -->\n\nnew \\1\n\n<!-- end -->\nbetween\n<!-- two -->\n\n2\n\n<!-- end -->\nlast\n"
    )
    assert filled(page, {"one": r"new \1", "two": "2"}) == page


@pytest.mark.parametrize(
    ("page", "count"),
    [("nothing here", 0), (PAGE + PAGE, 2), ("<!-- one -->\nno end\n<!-- two -->\n<!-- end -->\n", 0)],
)
def test_a_part_has_one_place(page, count):
    with pytest.raises(ValueError, match=f"the page has {count} places for 'one', expected 1"):
        filled(page, {"one": "new"})


def test_a_table_and_its_rule():
    assert table(("a", "b"), [("x", 1), ("y", 2)], "---:") == "| a | b |\n|---|---:|\n| x | 1 |\n| y | 2 |"


def test_a_page_is_filled_in_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- part -->\n\nold\n\n<!-- end -->\nbehind\n", encoding="utf-8")
    fill(page, {"part": "λ"})
    assert page.read_text(encoding="utf-8") == "before\n<!-- part -->\n\nλ\n\n<!-- end -->\nbehind\n"
