"""JSON with an indent is json's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.json_text import indented

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(DOCUMENTS)
def test_the_text_is_that_of_json(document: Any) -> None:
    if "Infinity" not in json.dumps(document):
        assert indented(document) == json.dumps(document, indent=1, allow_nan=False)


@pytest.mark.parametrize("document", [float("nan"), [float("inf")], {"a": [float("nan"), {}]}])
def test_what_json_has_no_number_for_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        indented(document)
