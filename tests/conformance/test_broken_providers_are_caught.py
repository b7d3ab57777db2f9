"""The kit can fail: each deliberately broken provider is rejected by the check named here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from broken import BROKEN
from model import ModelFactory, ModelProvider
from perdure.clock import ManualClock
from perdure.conformance import (
    check_classes,
    harness,
    lock_expiration,
    long_polling,
    queue_semantics,
)
from perdure.conformance.harness import Store
from perdure.conformance.stateful import machine

CAUGHT_BY = {
    # turns
    "LocksMessagesOnly": "TestFencing.test_a_late_message_lets_no_second_owner_in",
    "LetsZombiesCommit": "TestErrorHandling.test_an_expired_token_cannot_ack",
    "RevivesExpiredLocks": (
        "TestInstanceLocksExpire.test_an_expired_instance_lock_cannot_be_renewed"
    ),
    "DropsLateArrivals": (
        "TestInstanceLocking.test_a_late_message_survives_the_ack_and_comes_alone"
    ),
    "ConsumesWhatWasLeftOut": (
        "TestUndecodableMessages.test_one_that_a_turn_leaves_out_stays_queued"
    ),
    "ConsumesWhatIsGone": "TestKeptLocks.test_a_message_is_consumed_once",
    "FiresTimersAtOnce": "TestWholeTurns.test_a_timer_of_a_turn_is_visible_at_its_time",
    "LeavesHolesInHistories": (
        "TestAtomicity.test_a_turn_that_is_ahead_of_the_store_changes_nothing_and_keeps_the_lock"
    ),
    "OverwritesEvents": "TestWholeTurns.test_a_refused_turn_leaves_no_trace_and_can_be_repeated",
    "CommitsInTwoSteps": "TestWholeTurns.test_a_refused_turn_leaves_no_trace_and_can_be_repeated",
    "RepeatsKeptCommits": ("TestKeptLocks.test_a_repeated_commit_under_a_kept_lock_is_a_duplicate"),
    "CancelsBeforeScheduling": (
        "TestCancellation.test_what_is_scheduled_and_cancelled_by_one_turn_is_gone"
    ),
    "LeavesTimersBehind": "TestCancellation.test_a_cancelled_timer_never_fires",
    "EndsRenewedLocksLate": "TestInstanceLocksExpire.test_a_renewal_may_end_a_lock_earlier",
    "SettlesNothing": "TestFusedCommits.test_a_completion_and_its_turn_are_one_commit",
    "IgnoresStatusWithoutEvents": ("TestDeletion.test_ended_instances_are_deleted_without_force"),
    "CountsEveryTurnAsStatusChange": ("TestCustomStatus.test_a_turn_without_a_change_preserves_it"),
    "RewritesCreationTimes": ("TestLookingUp.test_times_are_written_once_and_updates_are_noticed"),
    "SharesStateWithReplay": (
        "TestSnapshots.test_a_key_of_the_running_execution_is_seen_by_clients_only"
    ),
    "DropsUndecodableMessages": (
        "TestUndecodableMessages.test_they_are_delivered_as_they_are_and_in_their_place"
    ),
    "RaisesOnDamagedHistory": (
        "TestUnreadableHistory.test_damaged_history_is_handed_out_and_says_so"
    ),
    "BlocksOnOrphans": "TestOrphans.test_orphans_do_not_block_other_instances",
    "DeletesOrphans": "TestOrphans.test_an_early_event_is_delivered_with_its_start",
    "UsesTheFirstRangeOnly": "TestFrameworkVersions.test_every_range_counts",
    "FiltersAfterLocking": (
        "TestFrameworkVersions.test_an_instance_that_was_skipped_is_not_locked"
    ),
    "GivesUpAfterALostRace": (
        "TestContention.test_ten_fetches_over_ten_ready_instances_get_ten_in_every_round"
    ),
    "HandsOutGuessableTokens": "TestFencing.test_tokens_cannot_be_guessed",
    "DelaysMessagesInsteadOfInstances": (
        "TestBackingOff.test_the_times_of_the_messages_stay_as_they_were"
    ),
    "ForgivesEveryMessage": "TestBackingOff.test_only_the_batch_is_forgiven_its_attempt",
    "CountsOnlyExpiredAttempts": ("TestAttemptCounts.test_every_delivery_after_an_abandon_counts"),
    "NeverOpensAgain": "TestMultipleExecutions.test_an_ended_execution_can_be_opened_again",
    # work
    "AcceptsZombieCompletions": ("TestFencing.test_the_completion_of_a_zombie_is_not_accepted"),
    "DeletesBeforeCompleting": ("TestWholeTurns.test_a_completion_is_never_lost_between_two_steps"),
    "RetriesAtOnce": "TestQueueSemantics.test_a_retry_takes_the_place_of_its_item",
    "TakesSmallItemsFirst": "TestFetchingSeveral.test_a_large_item_is_not_overtaken",
    "TakesTheNewestFirst": ("TestQueueSemantics.test_work_comes_out_in_the_order_it_went_in"),
    "ShowsEveryTag": "TestTags.test_tags_come_through_a_turn",
    "IgnoresActivityNames": "TestActivityNames.test_only_known_names_are_taken",
    "ForgetsWhoOwnsSessions": ("TestSessionRouting.test_another_owner_gets_nothing_of_it"),
    "StarvesWorkersAtCapacity": ("TestSessionRouting.test_at_capacity_an_owner_keeps_being_served"),
    "RenewsIdleSessions": "TestSessionUpkeep.test_an_idle_timeout_of_zero_renews_none",
    "NeverRenewsSessions": (
        "TestSessionRenewal.test_a_renewed_lease_ends_as_long_after_the_renewal"
    ),
    "NeverRenewsWork": (
        "TestWorkOutlivesItsInstance.test_a_lock_is_renewed_while_the_instance_runs"
    ),
    "EndsRenewedWorkLate": "TestWorkLocksExpire.test_a_renewal_may_end_an_item_lock_earlier",
    "ForgetsHeartbeats": ("TestWorkLocksExpire.test_a_heartbeat_is_shown_to_the_next_delivery"),
    "RenewsCancelledWork": ("TestCancellation.test_renewing_cancelled_work_tells_the_worker"),
    # administration
    "WritesAfterAMove": (
        "TestWritesAfterAMove.test_a_handle_that_was_open_writes_nothing_any_more"
    ),
    "LeavesWorkBehind": "TestDeletion.test_a_deleted_id_starts_again_from_nothing",
    "DeletesBetweenExecutions": (
        "TestLifeBetweenExecutions.test_an_instance_with_its_next_start_queued_is_alive"
    ),
    "OrphansChildren": "TestDeletion.test_a_child_that_is_not_listed_saves_its_parent",
    "DeletesOneByOne": "TestDeletion.test_one_running_instance_saves_all_of_the_list",
    "DeletesWhatEndedLater": "TestBulkDeletion.test_completed_before_selects_among_all",
    "PrunesWhatEndedLater": "TestPruning.test_completed_before_selects_among_all_instances",
    "PrunesState": "TestLifeOfState.test_a_key_of_a_pruned_execution_survives",
    "PrunesTheCurrentExecution": ("TestPruning.test_the_current_execution_is_never_pruned"),
    "PagesByTimeAlone": ("TestListing.test_pages_follow_each_other_without_gap_or_double"),
    "ListsBesideThePrefix": "TestListing.test_a_prefix_selects_nothing_beside_it",
    "SuspendsWithoutTheLock": "TestSuspending.test_suspending_takes_the_lock_away",
    "ResumesWithOldAttempts": "TestSuspending.test_resuming_starts_the_attempts_again",
    "CountsDelayedAsVisible": "TestTotals.test_visible_delayed_and_locked_are_told_apart",
    "ImportsEverythingAtOnce": "TestImport.test_what_was_exported_comes_back_the_same",
    "ExportsTheCurrentExecutionOnly": "TestExport.test_it_holds_everything_about_the_instance",
    # intake
    "TakesAnyId": "TestBadIds.test_of_an_instance",
    "TakesAnyAmountOfMail": "TestFullQueues.test_mail_is_refused_when_too_much_waits",
    "TakesAPartOfACall": "TestFullQueues.test_a_call_with_too_much_mail_leaves_nothing",
    "TakesAnySize": "TestBadTexts.test_in_a_work_item",
    "TakesAnyWorkOfATurn": "TestBadTexts.test_in_what_a_turn_sends",
    "TakesEventZero": "TestBadNumbersAndTags.test_event_ids_begin_with_one",
    "StartsTwice": "TestAbsent.test_an_id_with_a_queued_start_is_not",
    "StartsManyInSilence": ("TestWatching.test_starts_that_are_sent_together_wake_who_watches"),
    "StartsManyWithoutWaking": (
        "TestWakingForATurn.test_starts_that_are_sent_together_wake_as_many_fetches"
    ),
    "GivesUpAmongMisfits": (
        "TestHandlers.test_hundreds_of_unfit_instances_do_not_hide_the_oldest_that_fits"
    ),
    "CallsALostLockBusy": "TestErrorHandling.test_an_unissued_token_is_called_invalid",
    "AnswersErrorsWithNoWork": "TestErrorsAreNotSilence.test_a_closed_handle_says_so",
    "NamesAnotherClock": "TestOwnClock.test_it_names_the_clock_that_was_handed_in",
    "AnswersTheLastFetchFirst": (
        "TestKeptLocks."
        "test_concurrent_fetches_of_one_owner_are_answered_in_the_order_of_their_calls"
    ),
    "NeverWaits": "TestLengthOfAPoll.test_a_long_poll_for_a_turn_waits",
    "WaitsToTheEnd": "TestWakingForATurn.test_a_message_wakes_a_waiting_fetch",
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "TestKeptLocks.test_a_message_is_consumed_once": {"custom_status": None},
    "TestSnapshots.test_a_key_of_the_running_execution_is_seen_by_clients_only": {"status": None},
    "TestBadIds.test_of_an_instance": {"bad": ""},
    "TestBadTexts.test_in_what_a_turn_sends": {"bad": '"' + "x" * 4_000_000 + '"'},
    "TestBadTexts.test_in_a_work_item": {"bad": '"' + "x" * 4_000_000 + '"'},
    "TestBadNumbersAndTags.test_event_ids_begin_with_one": {"event_id": 0},
    "TestListing.test_a_prefix_selects_nothing_beside_it": {"last": "a"},
}
"""For parametrised checks: one of their cases."""


async def run_check(name: str, provider: type[ModelProvider]) -> None:
    class_name, function_name = name.split(".")
    found = check_classes()[class_name]
    store = Store(ModelFactory(provider), ManualClock(), handles=1)
    await store.open()
    try:
        function = getattr(found, function_name).__wrapped__
        await function(found(), store, **ARGUMENTS.get(name, {}))
    finally:
        await store.cleanup()


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_each_broken_provider_fails_its_check(
    broken: type[ModelProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some never wake a fetch: their checks fail when this time is over.
    for module in (harness, lock_expiration, long_polling, queue_semantics):
        monkeypatch.setattr(module, "UNTIL_SECONDS_MAX", 2.0)
    with pytest.raises((Exception, pytest.fail.Exception)) as failure:
        asyncio.run(run_check(CAUGHT_BY[broken.__name__], broken))

    assert not isinstance(failure.value, TypeError | AttributeError | NameError | LookupError), (
        "the check did not run"
    )


@pytest.mark.parametrize("name", sorted(set(CAUGHT_BY.values())))
def test_the_sound_provider_passes_those_checks(name: str) -> None:
    asyncio.run(run_check(name, ModelProvider))


def test_every_broken_provider_is_named_and_explains_itself() -> None:
    assert sorted(CAUGHT_BY) == sorted(broken.__name__ for broken in BROKEN)
    assert all(broken.__doc__ for broken in BROKEN)
    assert len(BROKEN) >= 25


@pytest.mark.parametrize(
    "name",
    [
        "DropsLateArrivals",
        "CancelsBeforeScheduling",
        "SharesStateWithReplay",
        "ForgivesEveryMessage",
        "TakesTheNewestFirst",
        "RetriesAtOnce",
    ],
)
def test_the_state_machine_finds_it_too(name: str) -> None:
    (broken,) = (each for each in BROKEN if each.__name__ == name)

    with pytest.raises(AssertionError, match="differs from the model"):
        run_state_machine_as_test(
            machine(lambda: ModelFactory(broken), model=ModelFactory),
            settings=settings(
                max_examples=200,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
