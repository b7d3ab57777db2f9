"""The state machine: random sequences of every verb, on a provider and on a model side by side.

For a provider's own tests:

    TestMyMachine = state_machine(MyFactory)

The model is the provider whose answers count as right. By default it is the in-memory provider;
``model`` takes the factory of another one. Needs Hypothesis, which is imported only when a machine
is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.conformance.harness import ProviderFactory

if TYPE_CHECKING:
    import unittest
    from collections.abc import Callable

    from hypothesis.stateful import RuleBasedStateMachine

    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider

EXAMPLES: Final = 300
STEPS: Final = 40


class InMemoryFactory(ProviderFactory):
    """Makes the default model: the in-memory provider."""

    def create(self, clock: ManualClock) -> Provider:
        from perdure.providers.sqlite.memory import InMemoryProvider

        return InMemoryProvider(clock=clock)


def state_machine(
    factory: Callable[[], ProviderFactory],
    *,
    model: Callable[[], ProviderFactory] = InMemoryFactory,
    examples: int = EXAMPLES,
    steps: int = STEPS,
) -> type[unittest.TestCase]:
    """Return a test case that compares the provider with the model.

    It runs the same sequences in every run.
    """
    from hypothesis import HealthCheck, Phase, settings

    test_case: type[unittest.TestCase] = machine(factory, model=model).TestCase
    test_case.settings = settings(  # type: ignore[attr-defined]
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        # The phase "explain" traces every line of a failing sequence, which takes minutes.
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return test_case


def machine(
    factory: Callable[[], ProviderFactory],
    *,
    model: Callable[[], ProviderFactory] = InMemoryFactory,
) -> type[RuleBasedStateMachine]:
    """Return the machine itself, for a campaign with its own settings."""
    from hypothesis.stateful import rule

    from perdure.conformance._machine.administration import AdminRules
    from perdure.conformance._machine.comparison import actions_of

    class Machine(AdminRules):
        def provider_factory(self) -> ProviderFactory:
            return factory()

        def model_factory(self) -> ProviderFactory:
            return model()

        @rule(action=actions_of(AdminRules))
        def step(self, action: tuple[str, dict[str, Any]]) -> None:
            name, arguments = action
            getattr(self, name)(**arguments)

    return Machine
