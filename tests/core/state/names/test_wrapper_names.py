"""Names without the prefixes of wrappers, where no module says what wraps."""

from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.state.names.wrapper_names import canonical_name, names_alone, under_names_of

PARTS = st.sampled_from(["module", "_orig_mod", "_checkpoint_wrapped_module", "a", "b"])


@given(st.lists(st.sampled_from(["module", "a", "b"]), min_size=1, max_size=3), st.data())
def test_a_copy_is_matched_by_the_names_of_the_model_or_not_at_all(path, data):
    names = list(
        dict.fromkeys(data.draw(st.lists(st.sampled_from(["w", "a.w", "module.w", "a.module.w"]), min_size=1)))
    )
    prefix = ".".join(path)
    copy = {f"{prefix}.{name}": name for name in names}
    found = under_names_of(names, copy)
    assert len(found) == len(copy)
    if all(part == "module" for part in path) and len(set(map(canonical_name, names))) == len(names):
        assert found == {name: name for name in names}


@given(
    st.lists(
        st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: ".".join([*parts, "w"])), min_size=1, unique=True
    )
)
def test_names_alone_keep_a_module_inside_and_lose_what_all_have_in_front(names):
    """ADR-0056: ``module`` is an ordinary word; the others are words of torch's alone."""
    found = names_alone(names)
    assert list(found) == names
    for name, short in found.items():
        assert canonical_name(short) == canonical_name(name)
        assert not {"_orig_mod", "_checkpoint_wrapped_module"} & {*short.split(".")}
    wrapped = names_alone([f"module._orig_mod.{name}" for name in names])
    assert list(wrapped.values()) == list(found.values())
