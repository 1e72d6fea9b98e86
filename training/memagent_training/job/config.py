"""The settings of a training run: TRL's GRPOConfig with the settings of Multi-Conv DAPO.

TRL's names are kept for what TRL has: `epsilon` and `epsilon_high` (clipping), `delta` (dual clip), `beta` (KL against
the reference model), `temperature`, `entropy_coef`, `importance_sampling_level` ("sequence" for a GSPO-like ratio per
conversation), `mask_truncated_completions`. The defaults are the released MemAgent recipe's.

Options that mean nothing for logged runs are fixed: generation, batch sizes (`token_budget` takes their place),
gradient accumulation (an optimizer step is planned as a whole), and the type of loss (`loss_weights` selects its
mean).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from trl.trainer.grpo_config import GRPOConfig

from memagent_training.algorithm.advantages import AdvantageSettings, Baseline, LossWeights, OverlongPenalty
from memagent_training.algorithm.credit import parse_credit_terms
from memagent_training.algorithm.loss import TokenLoss
from memagent_training.algorithm.planner import PADDING_ROW_TOKENS, Layout
from memagent_training.algorithm.schedule import Schedule
from memagent_training.data.rollouts import RolloutGroup
from memagent_training.training_errors import TrainingError


class OldLogProbs(StrEnum):
    """The denominator of the clipped loss's probability ratio."""

    RECOMPUTED = "recomputed"
    """Log-probs under the initial weights, computed once before the first step (verl, MemAgent). The sampler's own are
    then used only by `importance_cap`."""

    LOGGED = "logged"
    """The sampler's logged log-probs: no additional forward pass, and numerical differences between sampler and trainer
    are clipped like other differences."""


FIXED_OPTIONS: dict[str, tuple[object, str]] = {
    "eval_strategy": ("no", "measure checkpoints with memagent eval"),
    "gradient_accumulation_steps": (1, "an optimizer step is planned as a whole; lower token_budget to save memory"),
    "loss_type": ("dapo", "loss_weights chooses the mean"),
    "steps_per_generation": (None, "nothing is generated"),
    "generation_batch_size": (None, "nothing is generated"),
    "save_only_model": (False, "training could not continue from such a checkpoint"),
    "sync_ref_model": (False, "the reference model is constant, so that a resumed training run has the same one"),
    "use_vllm": (False, "runs are replayed; roll them out with the reader"),
    "use_transformers_continuous_batching": (False, "runs are replayed; roll them out with the reader"),
    "num_iterations": (1, "num_train_epochs makes several passes over the runs"),
    "top_entropy_quantile": (1.0, "with a quantile per micro-batch, the loss would depend on their split"),
    "use_adaptive_entropy": (False, "entropy_coef is constant"),
    "off_policy_mask_threshold": (None, "importance_cap limits the effect of stale runs"),
    "scale_rewards": ("group", "use divide_by_std instead"),
    "use_bias_correction_kl": (False, "the KL is that of the released recipe"),
    "multi_objective_aggregation": ("sum_then_normalize", "each run has one reward"),
    "remove_unused_columns": (False, "runs have no columns"),
    "push_to_hub": (False, "upload the finished folder, which has profile and templates too: hf upload NAME FOLDER"),
}
"""TRL's options that must keep these values, each with the reason or the setting to use instead."""
_EFFECTIVE_OPTIONS: Final = frozenset(
    {
        "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "cast_lm_head_to_fp32",
        "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_timeout", "debug", "deepspeed",
        "disable_tqdm", "epsilon_high", "fp16", "fsdp", "fsdp_config", "full_determinism", "gradient_checkpointing",
        "gradient_checkpointing_kwargs", "log_completions", "log_level", "log_level_replica", "log_on_each_node",
        "logging_first_step", "logging_nan_inf_filter", "logging_strategy", "lr_scheduler_kwargs", "max_steps",
        "model_init_kwargs", "num_completions_to_print", "num_train_epochs", "optim", "optim_args",
        "optim_target_modules", "output_dir", "project", "report_to", "router_aux_loss_coef",
        "run_name", "save_on_each_node", "save_strategy", "seed", "tf32", "torch_compile", "torch_compile_backend",
        "torch_compile_mode", "trackio_space_id", "use_cpu",
    }
)  # fmt: skip
"""The inherited settings that have an effect here."""
_MINIMUMS = {
    "epsilon": 0, "beta": 0, "kl_clamp": 0, "learning_rate": 0, "muon_learning_rate": 0, "importance_cap": 1,
    "groups_per_step": 1, "token_budget": PADDING_ROW_TOKENS, "max_skipped_steps": 0, "seed": 0,
}  # fmt: skip
_CHOICES: dict[str, Sequence[str | None]] = {
    "save_dtype": [None, "float32", "bfloat16", "float16"],
    "layout": list(Layout),
    "old_logprobs": list(OldLogProbs),
    "importance_sampling_level": ["token", "sequence"],
    "baseline": list(Baseline),
    "loss_weights": list(LossWeights),
}


@dataclass
class MultiConvDAPOConfig(GRPOConfig):
    """Settings of a `MultiConvDAPOTrainer`; `memagent_training.job.job_settings` loads published ones.

    Raises:
        TrainingError: a value is invalid, or a fixed option of TRL is changed.
    """

    learning_rate: float = 1e-6
    muon_learning_rate: float | None = None
    """If given, Muon updates the layers' matrices at this rate, and AdamW the rest at `learning_rate`
    (`MuonWithAdamW`): for small policies that were trained from scratch. Both follow the same schedule."""
    lr_scheduler_type: str = "constant_with_warmup"
    warmup_steps: float = 20
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    logging_steps: float = 1
    epsilon: float = 0.2
    delta: float | None = 3.0
    beta: float = 1e-3
    # Set here even where they equal TRL's defaults, because those change between versions.
    use_bias_correction_kl: bool = False
    importance_sampling_level: str = "token"
    temperature: float = 1.0
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    mask_truncated_completions: bool = False
    loss_type: str = "dapo"
    disable_dropout: bool = True
    ddp_find_unused_parameters: bool | None = False
    remove_unused_columns: bool | None = False
    save_steps: float = 10
    save_total_limit: int | None = 3

    save_dtype: str | None = None
    """The number format of the weights in a policy's folder: float32, bfloat16 or float16; None keeps the trainer's.
    Checkpoints always keep the trainer's."""
    groups_per_step: int = 8
    """Groups per optimizer step; the last step of a pass may have fewer."""
    layout: str = Layout.PREFIX_TREE.value
    """How a micro-batch is forwarded: padded, packed or prefix_tree. The result is the same."""
    token_budget: int = 16_384
    """The maximum number of tokens that a process forwards at once, in the layout's count."""
    baseline: str = Baseline.GROUP_MEAN.value
    divide_by_std: bool = False
    advantage_epsilon: float = 1e-6
    credit: list[dict[str, Any]] | None = None
    """The terms of the advantage (`CreditTerm`), each a mapping; if left out, the outcome alone. For example [{reward:
    outcome, weight: 0.8}, {reward: format, weight: 0.2, scope: conversation}]."""
    overlong_max_length: int | None = None
    """Completion tokens at which DAPO's soft penalty reaches -1; None for no penalty."""
    overlong_cache_length: int | None = None
    """The number of tokens before `overlong_max_length` over which the penalty grows."""
    drop_zero_variance: bool = False
    loss_weights: str = LossWeights.TOKEN_MEAN.value
    old_logprobs: str = OldLogProbs.RECOMPUTED.value
    kl_clamp: float | None = 10.0
    """The maximum of a token's KL estimate; None for no maximum."""
    importance_cap: float | None = None
    """If given, each token's policy gradient is multiplied by min(p_old / p_logged, cap): token-level truncated
    importance sampling for runs that older weights, or another engine's arithmetic, sampled. With `old_logprobs` logged
    the weight is always 1: the ratio is then relative to the sampler itself, and is clipped."""
    logged_after_temperature: bool = False
    """Whether the logged log-probs are those of the sampled distribution, after temperature (vLLM: --logprobs-mode
    processed_logprobs). Otherwise they are before temperature, and can be used only at a temperature of 1."""
    skip_certain: float = 0.0
    """Skip the forward pass of completions to which the sampler gave a probability above 1 - skip_certain; they still
    count in the means. The gradient of such a completion is at most about this fraction of an uncertain one's: with
    0.001, copied memories are not forwarded. 0 forwards every row that has a gradient."""
    max_skipped_steps: int = 3
    """The number of consecutive optimizer steps that may be skipped because loss or gradient is not finite; after one
    more, training stops."""
    max_logprob_gap: float = 0.2
    """The maximum mean absolute difference per token, in nats, between logged and recomputed log-probs. If it is
    larger, training does not start, because another model wrote the runs. There is a warning from 0.02 on; vLLM in
    float32 differs by 2e-6."""

    @classmethod
    def list_setting_names(cls) -> list[str]:
        """Return the names of the settings that have an effect, and of the fixed ones."""
        return sorted({*cls.__annotations__, *_EFFECTIVE_OPTIONS, *FIXED_OPTIONS} & cls.__dataclass_fields__.keys())

    def __post_init__(self) -> None:
        # The smallest values that TRL accepts; micro-batches are planned from token_budget instead.
        self.per_device_train_batch_size = 2
        self.num_generations = 2
        if self.steps_per_generation == 1:  # super() sets both; a loaded config has them
            self.steps_per_generation = self.generation_batch_size = None
        self._validate()
        super().__post_init__()  # type: ignore[no-untyped-call]

    def _validate(self) -> None:
        for name, (fixed_value, reason) in FIXED_OPTIONS.items():
            setting = getattr(self, name, fixed_value)
            if setting != fixed_value:
                raise TrainingError(f"{name}={setting!r} is not supported: {reason}")
        if self.temperature <= 0:
            raise TrainingError(
                f"temperature must be above 0, got {self.temperature}",
                hint="Pass the temperature at which the runs were sampled.",
            )
        for name, minimum in _MINIMUMS.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:  # NaN is not, either
                raise TrainingError(f"{name} must be at least {minimum}, got {value}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise TrainingError(
                    f"{name} must be one of {', '.join(map(str, choices))}, got {getattr(self, name)!r}"
                )
        if (self.importance_cap is not None or self.old_logprobs == OldLogProbs.LOGGED) and not self.logged_is_sampled:
            raise TrainingError(
                f"the runs' log-probs are those before temperature, and temperature is {self.temperature}",
                hint="Train without importance_cap and with old_logprobs: recomputed, or on runs sampled at 1. If the "
                "server reported those after temperature, set logged_after_temperature: true.",
            )
        if not 0 <= self.skip_certain < 1:
            raise TrainingError(
                f"skip_certain must be at least 0 and below 1, got {self.skip_certain}",
                hint="Set it to 0 to skip none.",
            )
        if self.skip_certain and (not self.logged_is_sampled or self.beta != 0 or self.entropy_coef != 0):
            raise TrainingError(
                f"skip_certain={self.skip_certain} needs log-probs as sampled, beta=0 and entropy_coef=0; "
                f"got temperature={self.temperature}, beta={self.beta}, entropy_coef={self.entropy_coef}",
                hint="Sample at temperature 1 (or with log-probs after temperature) without KL and entropy bonus, or "
                "set skip_certain=0.",
            )
        clip_bound = 1 + self.token_loss.clip_high
        if self.delta is not None and self.delta <= clip_bound:
            raise TrainingError(
                f"delta must be above the upper clipping bound of {clip_bound}, got {self.delta}",
                hint="Set it to 3, the usual dual clip, or to none.",
            )
        self.advantage_settings  # noqa: B018  it raises if they are invalid

    def require_steps_after_warm_up(self, steps: int) -> None:
        """Refuse a training run that ends during its warm-up, whose first learning rate is 0.

        Raises:
            TrainingError: the warm-up takes all optimizer steps.
        """
        warm_up = self.get_warmup_steps(steps)
        if warm_up >= steps:
            raise TrainingError(
                f"the learning rate warms up over {warm_up} optimizer steps, and the training has {steps}",
                hint="Set warmup_steps lower (0 for none) or groups_per_step, or take more runs, passes or iterations.",
            )

    @property
    def token_loss(self) -> TokenLoss:
        """The loss of each token."""
        return TokenLoss(
            clip_low=self.epsilon,
            clip_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            dual_clip=self.delta,
            kl_coef=self.beta,
            kl_clamp=self.kl_clamp,
            importance_cap=self.importance_cap,
            per_conversation=self.importance_sampling_level == "sequence",
        )

    @property
    def logged_is_sampled(self) -> bool:
        """Whether the logged log-probs are those of the sampled distribution."""
        return self.temperature == 1 or self.logged_after_temperature

    @property
    def advantage_settings(self) -> AdvantageSettings:
        """The settings of advantages and loss weights."""
        if (self.overlong_max_length is None) != (self.overlong_cache_length is None):
            raise TrainingError(
                "only one of overlong_max_length and overlong_cache_length is set", hint="Set both, or neither."
            )
        penalty = None
        if self.overlong_max_length is not None and self.overlong_cache_length is not None:
            penalty = OverlongPenalty(self.overlong_max_length, self.overlong_cache_length)
        return AdvantageSettings(
            baseline=Baseline(self.baseline),
            divide_by_std=self.divide_by_std,
            epsilon=self.advantage_epsilon,
            overlong_penalty=penalty,
            mask_truncated=self.mask_truncated_completions,
            drop_zero_variance=self.drop_zero_variance,
            loss_weights=LossWeights(self.loss_weights),
            credit=parse_credit_terms(self.credit or ()),
        )

    def make_schedule(
        self, groups: Sequence[RolloutGroup], *, seed: int | None = None, steps: int | None = None
    ) -> Schedule:
        """Return the schedule of optimizer steps over these groups, shuffled by `seed` (by default the config's).

        Raises:
            TrainingError: a reward is not a number, or groups share an id.
        """
        return Schedule(
            groups,
            self.advantage_settings,
            groups_per_step=self.groups_per_step,
            seed=self.seed if seed is None else seed,
            layout=Layout(self.layout),
            token_budget=self.token_budget,
            ranks=self.world_size,
            forward_all_rows=self.beta != 0 or self.entropy_coef != 0,
            steps=steps,
            skip_certain=self.skip_certain,
        )
