"""Which runs scripts/evidence.py makes: unknown names are refused, and so are those that nothing runs for."""

from __future__ import annotations

import pytest
from scripts_loader import load_script

choosing, parts, arrangements, streams, command = (
    load_script(f"evidence.{name}") for name in ("choosing", "parts", "arrangements", "streams", "command")
)


def refused(*given: str) -> str:
    """What the command line says to these options."""
    with pytest.raises(SystemExit) as ended:
        command.main(["--data", "nowhere", "--out", "nowhere", *given])
    return str(ended.value)


@pytest.mark.parametrize("more", [[], ["--only-write"]])
def test_names_that_nobody_knows_are_told_with_those_that_there_are(more: list[str]) -> None:
    said = refused(*more, "--arrangements", "static,joint+gate-wide")
    assert said.startswith("evidence.py: there is no arrangement joint+gate-wide; there are static, ")
    assert all(name in said for name in arrangements.ARRANGEMENTS)
    assert said.count(".") == 2, "one sentence"
    said = refused(*more, "--patterns", "steady,stead")
    assert said.startswith("evidence.py: there is no pattern stead; there are steady, ")
    assert all(name in said for name in (*streams.ORDERS, "only:sql_en"))
    assert refused(*more, "--parts", "magic").startswith(
        "evidence.py: there is no part magic; there are quick"
    )


def test_what_is_in_other_parts_is_told_with_these() -> None:
    said = refused("--parts", "main,poison", "--arrangements", "static,joint:restarted")
    assert said == (
        "evidence.py: the arrangement joint:restarted is in none of the chosen parts (main, poison); name "
        "one that has it with --parts: restart."
    )
    said = refused("--parts", "main,lean", "--patterns", "poison-noise,steady")
    assert said == (
        "evidence.py: the pattern poison-noise is in none of the chosen parts (main, lean); name one that "
        "has it with --parts: withheld, poison."
    )
    assert "none of the chosen parts (quick)" in refused("--quick", "--arrangements", "turns")


def test_names_that_are_never_run_together_are_refused() -> None:
    named = "--parts", "main,poison", "--patterns", "poison-noise", "--arrangements"
    assert refused(*named, "static,turns") == (
        "evidence.py: none of the patterns that are named is run with the arrangement turns; the chosen "
        "parts have it with steady, one-by-one, new-domain, shift, zipf, drift, unregistered, reworded, "
        "crossed."
    )
    assert choosing.chosen(named[1].split(","), ["poison-noise"], ["static"]) == [("poison-noise", "static")]


def test_runs_come_in_the_order_in_which_they_are_named() -> None:
    found = choosing.chosen(["main"], ["drift", "steady"], ["joint", "static"])
    pairs = [(pattern, name) for pattern in ("drift", "steady") for name in ("joint", "static")]
    assert found == pairs
    assert choosing.chosen(["lean", "lean"], [], []) == parts.PARTS["lean"]


def test_no_part_at_all_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"--parts names none; there are quick, main"):
        choosing.chosen([], [], [])


def test_quick_has_no_other_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("--quick", "--parts", "main") == "2"
    assert "leave out --quick or --parts" in capsys.readouterr().err


def test_each_arrangement_can_be_chosen() -> None:
    every = {name for jobs in parts.PARTS.values() for _, name in jobs}
    assert every == set(arrangements.ARRANGEMENTS)
