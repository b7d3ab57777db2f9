"""Random sequences of every verb, on a provider and on the in-memory model side by side.

For a provider's own tests:

    TestMyMachine = state_machine(MyFactory)

Needs Hypothesis, which is imported only when a machine is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import unittest
    from collections.abc import Callable

    from hypothesis.stateful import RuleBasedStateMachine

    from perdure.conformance.harness import ProviderFactory

EXAMPLES: Final = 300
STEPS: Final = 40


def state_machine(
    factory: Callable[[], ProviderFactory], *, examples: int = EXAMPLES, steps: int = STEPS
) -> type[unittest.TestCase]:
    """A test case that compares the provider with the model; the same sequences in every run."""
    from hypothesis import HealthCheck, Phase, settings

    test_case: type[unittest.TestCase] = machine(factory).TestCase
    test_case.settings = settings(  # type: ignore[attr-defined]
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        # Explaining what a failing sequence has in common traces every line, for minutes.
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return test_case


def machine(factory: Callable[[], ProviderFactory]) -> type[RuleBasedStateMachine]:
    """The machine itself, for a campaign with its own settings."""
    from hypothesis.stateful import rule

    from perdure.conformance._machine.administration import AdminRules
    from perdure.conformance._machine.comparison import actions_of

    class Machine(AdminRules):
        def provider_factory(self) -> ProviderFactory:
            return factory()

        @rule(action=actions_of(AdminRules))
        def step(self, action: tuple[str, dict[str, Any]]) -> None:
            name, arguments = action
            getattr(self, name)(**arguments)

    return Machine
