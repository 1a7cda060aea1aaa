"""TRL's side of the comparison: steps of GRPOTrainer, one for each line on stdin. Runs in the side environment."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

OUT = sys.stdout
sys.stdout = sys.stderr


def say(message: dict[str, Any]) -> None:
    print(f"@{json.dumps(message)}", file=OUT, flush=True)


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the answer is the right command, letter by letter."""
    return [float(made[0]["content"].strip() == wanted) for made, wanted in zip(completions, answer, strict=True)]


class Turnstile(TrainerCallback):
    started = used = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.report()
        sys.stdin.readline()
        self.started, self.used = time.perf_counter(), time.process_time()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.report()

    def report(self) -> None:
        seconds = {"seconds": time.perf_counter() - self.started, "cpu_seconds": time.process_time() - self.used}
        say(seconds if self.started else {"ready": True})


def main() -> None:
    options = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options["tasks"] * options["group"],
            num_generations=options["group"],
            max_completion_length=options["new_tokens"],
            learning_rate=options["lr"],
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_steps=options["steps"],
            beta=0.0,
            temperature=1.0,
            gradient_checkpointing=False,
            bf16=False,
            model_init_kwargs={"dtype": options["dtype"]},
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=options["model"],
            reward_funcs=right,
            args=config,
            train_dataset=Dataset.from_list(json.loads(Path(options["data"]).read_text())),
            processing_class=AutoTokenizer.from_pretrained(options["model"]),
            callbacks=[Turnstile()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
