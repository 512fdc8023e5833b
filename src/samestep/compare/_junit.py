"""Comparisons as JUnit XML, which every CI system shows."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from samestep.compare._result import Comparison

__all__ = ["junit"]


def junit(comparisons: Sequence[Comparison]) -> str:
    """Return a JUnit document: a suite per comparison, a case per phase, and one for what it proves.

    Args:
        comparisons: as `compare` returns them.

    Example:
        >>> ok = Comparison("exact", "1-worker", "4-workers", (1, 4), ())
        >>> 'failures="0"' in junit([ok])
        True
    """
    root = ElementTree.Element("testsuites", name="samestep compare")
    for found in comparisons:
        suite = ElementTree.SubElement(root, "testsuite", name=f"{found.reference} against {found.other}")
        n_failures = 0
        for phase, verdict in found.phase_verdicts().items():
            case = _case(suite, found, phase)
            if verdict == "different":
                n_failures += 1
                first = found.first
                text = found.sentence()
                if first is not None and first.phase != phase:
                    text = f"after the first difference: {text}"
                ElementTree.SubElement(case, "failure", message=text, type="different").text = text
            ElementTree.SubElement(case, "system-out").text = verdict
        case = _case(suite, found, "proves something")
        if not found.proves:
            n_failures += 1
            text = "\n".join(found.refusals)
            ElementTree.SubElement(case, "failure", message=found.refusals[0], type="refused").text = text
        if found.warnings:
            ElementTree.SubElement(case, "system-out").text = "\n".join(found.warnings)
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(n_failures))
        suite.set("errors", "0")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, found: Comparison, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite, "testcase", classname=f"samestep.compare.{found.reference}.{found.other}", name=name
    )
