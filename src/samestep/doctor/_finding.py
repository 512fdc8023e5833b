"""What was found: one line in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Grade", "note", "ok", "problem"]

Grade = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is about, such as "threads".
        grade: "ok"; "note" where something is worth knowing or costs time; "problem" where runs would fail.
        text: what was found.
        advice: what to do; empty where nothing is to be done.
        exit_code: what the command line returns because of it: 0, 2 for a wrong setting, 3 where workers fail.
    """

    name: str
    grade: Grade
    text: str
    advice: str = ""
    exit_code: int = 0


def ok(name: str, text: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(name, "ok", text)


def note(name: str, text: str, advice: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(name, "note", text, advice)


def problem(name: str, text: str, advice: str, exit_code: int = 2) -> Finding:
    """Return a finding that would make runs fail."""
    return Finding(name, "problem", text, advice, exit_code)
