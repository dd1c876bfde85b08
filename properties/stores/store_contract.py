"""The contract of stores: `check_store` runs each rule on a fresh store, and names every broken one."""

from collections.abc import Callable
from typing import Final

from trainfold.backends.stores.protocol import Store
from trainfold.properties.differences import ContractBroken
from trainfold.properties.stores import commit_rules, file_rules

STORE_RULES: Final[tuple[Callable[[Store], None], ...]] = (
    file_rules.it_has_the_methods,
    file_rules.what_is_written_is_read,
    file_rules.one_buffer_can_serve_for_all_parts,
    file_rules.a_write_of_another_size_fails_and_leaves_nothing,
    file_rules.an_uncommitted_file_is_replaced,
    file_rules.ranges_are_slices,
    file_rules.what_is_absent_is_said_to_be,
    file_rules.names_are_listed_one_level_at_a_time,
    commit_rules.a_commit_happens_once,
    commit_rules.a_commit_replaces_only_what_it_names,
    commit_rules.of_many_commits_one_wins,
    file_rules.files_that_are_synced_later_are_whole_or_gone,
    file_rules.writers_do_not_disturb_each_other,
    file_rules.hostile_names_are_refused,
    file_rules.deleting_removes_a_file_or_a_directory,
    commit_rules.one_writer_has_the_lock,
    file_rules.room_is_checked_before_writing,
    commit_rules.the_time_of_a_commit_is_told_or_not_known,
    commit_rules.a_swap_replaces_only_the_version_that_it_names,
    commit_rules.a_commit_may_be_as_old_as_what_it_replaces,
    commit_rules.hints_are_replaced,
    commit_rules.the_files_that_it_prefers_are_sizes_or_not_said,
)


def check_store(factory: Callable[[], Store]) -> None:
    """Check that a store keeps the contract of `Store`.

    Args:
        factory: makes an empty store; called once for each rule.

    Raises:
        ContractBroken: naming every broken rule.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> check_store(MemoryStore)
    """
    broken = []
    for rule in STORE_RULES:
        try:
            rule(factory())
        except Exception as error:  # noqa: BLE001  # whatever a foreign store raises breaks the rule
            broken.append(f"{rule.__name__.replace('_', ' ')}: {type(error).__name__}: {error}")
    if broken:
        raise ContractBroken(f"{len(broken)} of {len(STORE_RULES)} rules are broken:\n  " + "\n  ".join(broken))
