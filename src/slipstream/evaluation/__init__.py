"""What a trained model is worth: perplexity of texts, multiple-choice tasks, and text that it writes.

``questions`` reads task files, ``scoring`` computes log-likelihoods, ``tasks`` puts the two together; ``generation``
continues a text. Definitions are those of lm-eval; ``lm_eval_adapter``, the only file that imports it, lets it use a
model of ours.
"""
