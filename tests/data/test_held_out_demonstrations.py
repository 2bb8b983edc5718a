from lightning import Trainer

from rlalign.algorithms.sft import SFT
from rlalign.data.demonstrations import DemonstrationDataModule
from rlalign.models.policy import PolicyConfig


def test_a_held_out_problem_is_not_learned_from(tiny_model):
    sums = "reasoning_gym:chain_sum?size={}&min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    data = DemonstrationDataModule(sums.format(200), sums.format(20), step_size=200, seed=0)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(SFT(policy=PolicyConfig(tiny_model)), data)
    held_out = {row["question"] for row in data.val_data.rows}
    learned = [data.train_data.rows[i]["question"] for i in data.train_data.kept]
    assert not held_out & set(learned)
    dropped = sum(row["question"] in held_out for row in data.train_data.rows)
    assert dropped > 5, "the two must have problems in common"
    assert data.train_data.dropped == {"among the held-out ones": dropped}
    assert len(learned) + dropped == 200
