"""Generate documents like the filings of companies, with the true value of every field.

A filing has a cover, sections on business and risks, a discussion of results, an auditor's report and signatures. Each
fact has several wordings. Around the facts are similar ones that are not the answer: the revenue of last year or of a
segment, the staff of a competitor, a former auditor. All text is invented, so no policy has seen it.
"""

from __future__ import annotations

import calendar
import datetime
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, Field

QUESTION: Final = "What does the company report for the period of this filing?"
_FAMILY_NAMES: Final = (
    *("Aldren", "Borvik", "Calden", "Dorwen", "Estmar", "Farrow", "Gildan"),
    *("Harvik", "Iskren", "Jorund", "Kelmar", "Lorvan", "Mesrin", "Norvald"),
)
_INDUSTRIES: Final = (
    *("Steel", "Foods", "Marine", "Optics", "Paper", "Rail", "Salt"),
    *("Textiles", "Timber", "Tools", "Water", "Instruments", "Cement", "Glass"),
)
_LEGAL_FORMS: Final = ("Inc.", "Corporation", "Group", "Holdings", "Partners", "Works", "Company", "Trust")
_AUDITORS: Final = (
    *("Abelard & Finch LLP", "Cotter Mayhew LLP", "Dunmore Partners", "Ostrander & Vale LLP", "Pryce Lindqvist LLP"),
    *("Quill, Harrow & Co.", "Tamsin Rook LLP", "Weyland Brothers"),
)
_RISKS: Final = (
    *("Dependence on few customers", "Shortage of raw materials", "Changes in exchange rates", "Cyber attacks"),
    *("Loss of key personnel", "Stricter environmental rules", "Competition from abroad", "Pending litigation"),
    *("Rising cost of energy", "Product recalls", "Failure of acquisitions", "Natural disasters at our sites"),
)
_CURRENCY_SIGNS: Final = {"USD": "$", "EUR": "€", "GBP": "£", "CHF": "CHF "}
_CURRENCY_NAMES: Final = {"USD": "U.S. dollars", "EUR": "euros", "GBP": "pounds sterling", "CHF": "Swiss francs"}
_REASONS: Final = ("higher volumes", "two new plants", "better prices", "a mild winter", "an order of the navy")
_PLACES: Final = ("the northern region", "our overseas markets", "the coastal states", "the eastern plants")
_TOPICS: Final = ("warehouses", "delivery times", "leases", "pension plans", "spare parts", "inventories", "permits")

Scale = Literal["millions", "thousands", "billions"]
"""The unit in which a filing states its revenue."""


class Filing(BaseModel):
    """The fields that are read from each filing: the schema of the table."""

    company: str = Field(description="the name of the company that files")
    form: Literal["annual", "quarterly"]
    period_end: datetime.date = Field(description="the last day of the period, as YYYY-MM-DD")
    currency: Literal["USD", "EUR", "GBP", "CHF"]
    revenue: float = Field(description="total revenue of the period, in millions of the currency")
    net_income: float | None = Field(description="in millions of the currency; negative for a loss; null if not stated")
    employees: int | None = Field(description="of the company itself, at the end of the period; null if not stated")
    auditor: str = Field(description="the firm that audited this period, not a former one")
    risks: list[str] = Field(description="the headings under Risk Factors, in order")
    material_weakness: bool = Field(description="whether a material weakness in internal control is reported")


@dataclass(frozen=True, slots=True)
class GeneratedFiling:
    """The text of a filing, its true fields, and the properties that may make it hard to read."""

    name: str
    """The name of its file."""
    text: str
    truth: Filing
    scale: Scale
    has_former_auditor: bool
    """Whether the text names a former auditor before the current one."""
    wording: int
    """The index of the wording of its sentences, from 0 to 2."""


def generate_filings(count: int, *, seed: int = 23, words: int = 1500) -> Iterator[GeneratedFiling]:
    """Yield generated filings; equal arguments give equal filings.

    Args:
        count: the number of filings.
        seed: the seed of all random choices.
        words: the mean number of words; filings have from half to one and a half times as many.
    """
    for index in range(count):
        yield _generate_filing(index, random.Random(f"{seed}/{index}"), words)


def write_filings(folder: Path, count: int, *, seed: int = 23, words: int = 1500) -> dict[str, GeneratedFiling]:
    """Write generated filings to a folder, and return them by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    filings_by_name = {}
    for filing in generate_filings(count, seed=seed, words=words):
        (folder / filing.name).write_text(filing.text, encoding="utf-8")
        filings_by_name[filing.name] = filing
    return filings_by_name


def _generate_filing(index: int, rng: random.Random, words: int) -> GeneratedFiling:
    form: Literal["annual", "quarterly"] = "annual" if rng.random() < 0.6 else "quarterly"
    year, month = rng.randint(2004, 2024), rng.choice((3, 6, 9, 12))
    currency = rng.choice(list(_CURRENCY_SIGNS))
    truth = Filing.model_validate(
        {
            "company": f"{rng.choice(_FAMILY_NAMES)} {rng.choice(_INDUSTRIES)} {rng.choice(_LEGAL_FORMS)}",
            "form": form,
            "period_end": datetime.date(year, month, calendar.monthrange(year, month)[1]),
            "currency": currency,
            "revenue": round(rng.uniform(12, 9000), 1),
            "net_income": None if rng.random() < 0.15 else round(rng.uniform(-150, 400), 1) or 1.0,
            "employees": None if rng.random() < 0.2 else rng.randint(40, 60_000),
            "auditor": rng.choice(_AUDITORS),
            "risks": rng.sample(_RISKS, rng.randint(1, 6)),
            "material_weakness": rng.random() < 0.2,
        }
    )
    scale: Scale = rng.choices(("millions", "thousands", "billions"), (5, 3, 2))[0]
    has_former_auditor, wording = rng.random() < 0.25, rng.randrange(3)
    text = _FilingWriter(
        truth, scale, has_former_auditor, wording, rng, words // 2 + rng.randrange(max(1, words))
    ).write()
    return GeneratedFiling(f"filing-{index:05d}.txt", text, truth, scale, has_former_auditor, wording)


class _FilingWriter:
    """Writes the text of one filing."""

    def __init__(
        self, truth: Filing, scale: Scale, has_former_auditor: bool, wording: int, rng: random.Random, words: int
    ) -> None:
        self._truth, self._scale, self._has_former_auditor, self._wording = truth, scale, has_former_auditor, wording
        self._rng, self._words = rng, words
        self._period_end = f"{truth.period_end:%B} {truth.period_end.day}, {truth.period_end.year}"
        self._period = "fiscal year" if truth.form == "annual" else "quarter"

    def write(self) -> str:
        """Return the text of the filing."""
        sections = (
            self._write_cover(),
            ["Item 1. Business", *self._write_business()],
            ["Item 1A. Risk Factors", *self._write_risks()],
            ["Item 7. Discussion of Results", *self._write_results()],
            ["Item 8. Report of the Auditor", *self._write_audit()],
            ["Item 9A. Controls and Procedures", *self._write_controls()],
            ["Signatures", f"Signed on behalf of {self._truth.company} by its treasurer."],
        )
        filler_count = self._words // (40 * (len(sections) - 2))
        paragraphs = list[str]()
        for index, section in enumerate(sections):
            paragraphs += section
            if 0 < index < len(sections) - 1:
                paragraphs += (self._write_filler() for _ in range(filler_count))
        return "\n\n".join(paragraphs) + "\n"

    def _write_cover(self) -> list[str]:
        kind = "Annual report" if self._truth.form == "annual" else "Quarterly report"
        return [
            self._truth.company,
            f"{kind} for the {self._period} ended {self._period_end}",
            f"All amounts are in {_CURRENCY_NAMES[self._truth.currency]} unless stated otherwise.",
        ]

    def _write_business(self) -> Iterator[str]:
        yield f"{self._truth.company} makes and sells products for industry and households in {self._choose_place()}."
        competitor = f"{self._rng.choice(_FAMILY_NAMES)} Rivals Ltd"
        yield f"Our largest competitor, {competitor}, is said to have {self._rng.randint(40, 60_000):,} workers."
        if self._truth.employees is not None:
            employee_count = f"{self._truth.employees:,}"
            yield (
                f"At the end of the {self._period} we had {employee_count} employees.",
                f"We employed {employee_count} people as of {self._period_end}.",
                f"Our workforce numbered {employee_count} on the last day of the period.",
            )[self._wording]

    def _write_risks(self) -> Iterator[str]:
        for risk in self._truth.risks:
            yield f"Risk: {risk}"
            yield f"This could harm our results in {self._choose_place()}, and we may be unable to prevent it."

    def _write_results(self) -> Iterator[str]:
        truth, revenue = self._truth, self._format_amount(self._truth.revenue)
        previous_revenue = self._format_amount(truth.revenue * self._rng.uniform(0.6, 0.95))
        yield f"Revenue of the segment {self._rng.choice(_INDUSTRIES)} was {self._format_amount(truth.revenue * 0.3)}."
        yield f"In the same period of the year before, total revenue had been {previous_revenue}."
        yield (
            f"Total revenue for the {self._period} ended {self._period_end} was {revenue}, owing to "
            f"{self._choose_reason()}.",
            f"We achieved total revenue of {revenue} in the {self._period}, after {previous_revenue} before.",
            f"Owing to {self._choose_reason()}, total revenue rose to {revenue}.",
        )[self._wording]
        if truth.net_income is not None:
            sign = _CURRENCY_SIGNS[truth.currency]
            amount = f"{sign}{abs(truth.net_income):,.1f} million"
            is_loss = truth.net_income < 0
            yield (
                f"Net {'loss' if is_loss else 'income'} was {amount}.",
                f"The {self._period} ended with a net {'loss' if is_loss else 'income'} of {amount}.",
                f"Net income (loss): {f'({amount})' if is_loss else amount}.",
            )[self._wording]

    def _write_audit(self) -> Iterator[str]:
        if self._has_former_auditor:
            former_auditor = self._rng.choice([auditor for auditor in _AUDITORS if auditor != self._truth.auditor])
            yield f"{former_auditor} audited our statements of earlier years and was dismissed during the period."
        auditor = self._truth.auditor
        yield (
            f"{auditor} audited the statements for the {self._period} ended {self._period_end}.",
            f"The accompanying statements of this {self._period} were audited by {auditor}, independent accountants.",
            f"In our opinion the statements present fairly the position of the company. {auditor}",
        )[self._wording]

    def _write_controls(self) -> Iterator[str]:
        if self._truth.material_weakness:
            yield "Management identified a material weakness in internal control over financial reporting."
        else:
            yield "Management concluded that internal control was effective; it found no material weakness."

    def _format_amount(self, millions: float) -> str:
        sign = _CURRENCY_SIGNS[self._truth.currency]
        match self._scale:
            case "millions":
                return f"{sign}{millions:,.1f} million"
            case "thousands":
                return f"{sign}{millions * 1000:,.0f} thousand"
            case _:
                return f"{sign}{millions / 1000:,.4f} billion"

    def _choose_reason(self) -> str:
        return self._rng.choice(_REASONS)

    def _choose_place(self) -> str:
        return self._rng.choice(_PLACES)

    def _write_filler(self) -> str:
        """Return a paragraph of about 40 words that has numbers, but no fact that is asked for."""
        rng = self._rng
        topic, other_topic = rng.sample(_TOPICS, 2)
        return (
            f"Our {topic} in {self._choose_place()} were reviewed in {rng.randint(1990, 2024)}, and "
            f"{rng.randint(2, 99)} of them were renewed. "
            f"The cost of {other_topic} changed by {rng.uniform(0.1, 9):.1f} percent, "
            f"which we ascribe to {self._choose_reason()}. See note {rng.randint(1, 30)} on {topic} and {other_topic}."
        )
