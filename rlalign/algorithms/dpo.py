"""Direct preference optimization."""

from rlalign.algorithms.pairs import DPOLoss
from rlalign.algorithms.preference import PreferenceModule


class DPO(DPOLoss, PreferenceModule):
    r"""A classifier of pairs, whose score is how much more likely the policy makes a response than the reference does.

    .. math:: L = -\log\sigma\Big(\beta \log\frac{\pi_\theta(y_w|x)}{\pi_{ref}(y_w|x)}
        - \beta \log\frac{\pi_\theta(y_l|x)}{\pi_{ref}(y_l|x)}\Big)

    The reference is the policy as it was at the start. Log-probabilities are sums over the tokens that the assistant
    wrote, its end token included; the loss is a mean over the pairs of an optimizer step. It starts at ln 2.

    Source: Rafailov et al. 2023, eq. 7 (https://arxiv.org/abs/2305.18290); for the other losses see
    :mod:`rlalign.functional.preference_losses`.
    """
