"""The questions that policies answer, the frozen views they see, and how a policy is found by its kind.

A policy is a frozen pydantic model with a literal ``kind``, pure and synchronous: from the views that it gets, it
answers one question, always in the same way. It reads no clock, file or random number, so that the simulator can use
the same object. A policy suggests; the engine may refuse, to keep the last good copy.

::

    class Milestones(Promotion):
        kind: Literal["milestones"] = "milestones"
        steps: tuple[int, ...]

        def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
            return step.step in self.steps

A package offers policies through entry points of the group ``tieredckpt.policies``. The name of an entry
point is the question, a dot and the kind, and its value is the class; so a kind may answer several
questions, each with a class of its own::

    [project.entry-points."tieredckpt.policies"]
    "promotion.milestones" = "my_policies:Milestones"

A script offers its own through `register`. For processes that do not run the script, a configuration file names the
module that calls it, under ``policies`` of ``[store]`` (`offer`). A class is imported only when its kind is used, so a
broken class affects only its users.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, cast

from pydantic import BeforeValidator, SerializeAsAny, ValidationError

from tieredckpt import _registry
from tieredckpt._registry import path_of, the_kind
from tieredckpt.errors import Invalid
from tieredckpt.policy.views import Observed, StepView, StoreView, TierView
from tieredckpt.settings import Settings, did_you_mean, explain, problems, refusal

__all__ = [
    "GROUP",
    "QUESTIONS",
    "AnyEviction",
    "AnyPromotion",
    "AnyRetention",
    "AnySchedule",
    "Eviction",
    "Observed",
    "Policy",
    "Promotion",
    "Retention",
    "Schedule",
    "StepView",
    "StoreView",
    "TierView",
    "answers_for_good",
    "decided",
    "keeps_all",
    "offer",
    "parse",
    "register",
    "registered",
]

GROUP = "tieredckpt.policies"
"""The entry-point group of policies."""

_NESTING_LIMIT = 32
"""How deep a stored policy may nest: its JSON may come from a hostile store."""

_log = logging.getLogger("tieredckpt")


class Policy(Settings):
    """Base of the four questions; derive from one of those, never from this."""

    question: ClassVar[str] = ""
    """The first half of an entry point's name."""
    answer: ClassVar[str] = ""
    """The method that a policy of this question defines."""

    kind: str
    """Subclasses narrow it to one literal, which is the default."""

    @classmethod
    def noun(cls) -> str:
        return f"the {cls.question} policy `{the_kind(cls)}`"

    def _unanswered(self) -> NoReturn:
        # Not an abstract method: mypy forbids to pass abstract classes by value, as in parse(Promotion, …).
        raise NotImplementedError(f"{type(self).__name__} does not define {self.answer}()")


class Promotion(Policy):
    """Should this step go to this tier?"""

    question = "promotion"
    answer = "promotes"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        """Whether ``step``, committed on a nearer tier, is copied to ``tier``."""
        self._unanswered()

    def by_step_alone(self) -> bool:
        """Whether the answer depends only on the step's number, serial, ``saved_at``, ``nbytes`` and metrics.

        A step that such a policy refuses is not asked about at every change of the store. It counts for the
        `promotes` of the same class or of a base: a class that overrides `promotes` states it again.
        """
        return False


class Retention(Policy):
    """Which steps stay on this tier?"""

    question = "retention"
    answer = "retains"
    retains_all: ClassVar[bool] = False
    """Whether every step stays, even off-branch: nobody asks which then, since the answer would grow with them.

    A class that overrides `retains` states it again.
    """

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        """Serials of the steps that must stay on ``tier``; the others may leave it."""
        self._unanswered()


class Eviction(Policy):
    """In which order do the steps that need not stay leave, when room is needed?"""

    question = "eviction"
    answer = "order"

    def order(self, candidates: Sequence[StepView], tier: TierView, store: StoreView) -> list[int]:
        """The serial of each of ``candidates`` once, first to leave first.

        The engine moves off-branch steps to the front in any case.
        """
        self._unanswered()


class Schedule(Policy):
    """Is a save due now?"""

    question = "schedule"
    answer = "due"
    stays_due: ClassVar[bool] = False
    """Whether a due save stays due, at later steps and times, until a save is made or a failure happens.

    The simulator then asks about many steps at once instead of about each.
    """

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        """Whether the trainer should save, having finished ``step``; a class may state that it `stays_due`."""
        self._unanswered()


def decided(policy: Promotion | Schedule, answer: object) -> bool:
    """The ``answer`` that ``policy`` gave. Raises `TypeError` for None, which is of a method that lacks a `return`."""
    if answer is None:
        raise TypeError(f"{policy.kind}: {policy.answer}() gave None, not True or False; does it always `return`?")
    return bool(answer)


def answers_for_good(policy: Promotion) -> bool:
    """Whether the policy states, of its own answer, that it is `by_step_alone`, and holds until the step changes."""
    return _states(policy, "by_step_alone") and bool(policy.by_step_alone())


def keeps_all(policy: Retention) -> bool:
    """Whether the policy states, of its own answer, that it `retains_all`."""
    return _states(policy, "retains_all") and policy.retains_all


def _states(policy: Policy, claim: str) -> bool:
    """Whether ``claim`` is made by the class that defines the answer of the policy, or by a class below that."""
    for each in type(policy).__mro__:
        if claim in vars(each):
            return True
        if policy.answer in vars(each):
            break
    return False


QUESTIONS: tuple[type[Policy], ...] = (Promotion, Retention, Eviction, Schedule)

P = TypeVar("P", bound=Policy)


_offered: dict[str, type[Policy]] = {}
"""Policies given to `register`, by the name that their entry point would have."""


def register(policy: type[P]) -> type[P]:
    """Offer a policy class to `parse` without an entry point; usable as a decorator.

    Registering a class again, or its new version in a notebook, is fine. Raises `Conflict` when another
    class has its question and kind, `Invalid` when it is not a complete policy.
    """
    _check(policy)
    kind = the_kind(policy)
    name = f"{policy.question}.{kind}"
    _registry.refuse_taken(GROUP, name, f"the kind {kind!r} of {policy.question}", policy, _offered.get(name))
    _offered[name] = policy
    return policy


def offer(names: Iterable[str]) -> None:
    """Import modules that `register` policies, given as ``module``, or as ``module:Class`` to register that class.

    This runs their code, so it is only for names from the user, never for names from a step. Raises `Invalid` when one
    cannot be imported or is no policy, `Conflict` as `register`.
    """
    for name in names:
        module, _, path = name.partition(":")
        try:
            found = _imported(module)
            offered = operator.attrgetter(path)(found) if path else None
        except Exception as error:
            raise Invalid(f"`{name}` cannot be imported: {type(error).__name__}: {error}") from error
        if offered is not None:
            register(offered)


def _imported(name: str) -> ModuleType:
    main, spec = sys.modules["__main__"], importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None and spec.origin == getattr(main, "__file__", None):
        return main  # a script that names itself must not run twice
    return importlib.import_module(name)


def registered(base: type[P]) -> dict[str, type[P]]:
    """Every class that answers the question of ``base`` (such as `Promotion`), by kind.

    Entry points that cannot be loaded are left out, with a warning in the log ``tieredckpt``.
    """
    found: dict[str, type[P]] = {}
    for kind in _kinds(base):
        try:
            found[kind] = _load(base, kind)
        except Invalid as error:
            _log.warning("%s", error)
    return found


def parse(base: type[P], data: object) -> P:
    """The policy that ``data`` describes: a table with its ``kind``, the bare kind, or a policy itself.

    ``base`` is the question, such as `Retention`. Raises `Invalid` with one line per problem.
    """
    try:
        return _choose(base, data)
    except ValidationError as error:
        raise Invalid(explain(problems(error, (base.question,)))) from error


def _choose(base: type[P], data: object) -> P:
    if isinstance(data, base):
        _answers_at_once(type(data))
        return data
    if isinstance(data, Policy):
        raise refusal([((), f"`{data.kind}` answers {data.question}, not {base.question}")])
    if isinstance(data, str):
        data = {"kind": data}
    if not isinstance(data, Mapping):
        raise refusal([((), f"should be a kind of {base.question} or a table with its `kind`, not {data!r}")])
    if _nests_too_deep(data):
        raise refusal([((), f"nests more than {_NESTING_LIMIT} levels; write it flatter")])
    if not isinstance(data.get("kind"), str):
        known = ", ".join(_kinds(base)) or "none is installed"
        raise refusal([(("kind",), f"is required: a kind of {base.question} ({known})")])
    try:
        policy = _load(base, data["kind"])
    except Invalid as error:
        raise refusal([(("kind",), str(error))]) from error
    return policy.model_validate(dict(data))


def _load(base: type[P], kind: str) -> type[P]:
    name = f"{base.question}.{kind}"
    if name in _offered:
        return cast(type[P], _offered[name])

    def check(policy: object) -> None:
        found = _check(policy)
        if not issubclass(found, base) or the_kind(found) != kind:
            raise Invalid(f"it is a {found.question} policy of the kind `{the_kind(found)}`")

    policy = _registry.load(GROUP, name, f"the {base.question} policy `{kind}`", check)
    if policy is None:
        raise Invalid(_unknown(base, kind))
    return cast(type[P], policy)


def _check(policy: object) -> type[Policy]:
    if not (isinstance(policy, type) and issubclass(policy, QUESTIONS)):
        raise Invalid(f"{policy!r} is not a class derived from Promotion, Retention, Eviction or Schedule")
    the_kind(policy)
    question = next(base for base in QUESTIONS if issubclass(policy, base))
    if getattr(policy, policy.answer) is getattr(question, policy.answer):
        raise Invalid(f"{path_of(policy)} does not define {policy.answer}()")
    _answers_at_once(policy)
    return policy


def _answers_at_once(policy: type[Policy]) -> None:
    answer = getattr(policy, policy.answer)
    # A coroutine or a generator is truthy, so it would count as a yes each time.
    if inspect.iscoroutinefunction(answer) or inspect.isasyncgenfunction(answer):
        raise Invalid(
            f"{path_of(policy)}: define {policy.answer}() with `def`, not `async def`: a coroutine is no answer"
        )
    if inspect.isgeneratorfunction(answer):
        raise Invalid(f"{path_of(policy)}: {policy.answer}() is to `return` its answer: with `yield` there is none")
    if issubclass(policy, Promotion) and not _is_plain(policy, "by_step_alone"):
        raise Invalid(
            f"{path_of(policy)}: define by_step_alone() as a method with `def` that returns True or False: "
            "no field, attribute, property or coroutine"
        )


def _is_plain(policy: type[Policy], method: str) -> bool:
    found = inspect.getattr_static(policy, method, None)
    no_answers = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    returns = inspect.isfunction(found) and not any(each(found) for each in no_answers)
    return returns and method not in policy.model_fields  # a field hides the method of a base


def _kinds(base: type[Policy]) -> list[str]:
    prefix = f"{base.question}."
    names = _offered.keys() | _registry.offered(GROUP).keys()
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _unknown(base: type[Policy], kind: str) -> str:
    kinds = _kinds(base)
    if not kinds:
        return (
            f"`{kind}` is not known, and no {base.question} policy is: the entry points of {GROUP!r} are "
            "missing; install the package (`pip install -e .` in a checkout), or register() the classes"
        )
    elsewhere = [other.question for other in QUESTIONS if kind in _kinds(other)]
    asks = f" (it answers {' and '.join(elsewhere)})" if elsewhere else ""
    hint = did_you_mean(kind, kinds)
    if hint.startswith("; there are"):  # none is near, so it may be the user's own
        hint += "; to use your own, name its module under `policies` of [store]"
    return f"`{kind}` is not a kind of {base.question}{asks}{hint}"


def _nests_too_deep(data: object) -> bool:
    level = [data]
    for _ in range(2 * _NESTING_LIMIT):  # a policy's table, and the list in it
        level = [
            child
            for value in level
            if isinstance(value, (Mapping, list, tuple))
            for child in (value.values() if isinstance(value, Mapping) else value)
        ]
        if not level:
            return False
    return True


def _chooses(base: type[P]) -> Callable[[Any], P]:
    return functools.partial(_choose, base)


AnyPromotion = Annotated[SerializeAsAny[Promotion], BeforeValidator(_chooses(Promotion))]
"""Field type: a promotion policy, parsed by its kind."""

AnyRetention = Annotated[SerializeAsAny[Retention], BeforeValidator(_chooses(Retention))]
"""Field type: a retention policy, parsed by its kind."""

AnyEviction = Annotated[SerializeAsAny[Eviction], BeforeValidator(_chooses(Eviction))]
"""Field type: an eviction policy, parsed by its kind."""

AnySchedule = Annotated[SerializeAsAny[Schedule], BeforeValidator(_chooses(Schedule))]
"""Field type: a schedule, parsed by its kind."""
