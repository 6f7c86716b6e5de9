"""What a job calls survives the way to its node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launchers.job import ModuleCall


@given(
    st.builds(
        ModuleCall,
        st.text(),
        st.lists(st.text()).map(tuple),
        st.lists(st.text()).map(tuple),
        st.text(),
        st.lists(st.tuples(st.text(), st.floats(0.1, 10))).map(tuple),
        st.booleans(),
    )
)
def test_a_call_as_json_is_the_same_call(call: ModuleCall) -> None:
    assert ModuleCall.load(call.dump()) == call
