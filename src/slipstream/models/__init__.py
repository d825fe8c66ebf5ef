"""The models: parameters and forward passes, no training logic.

``shapes`` says what a model will be (names, shapes, FLOPs) and ``partition`` cuts it into stages, both without
importing torch; ``roles`` says what a parameter is for, by its name; ``llama`` is the decoder itself and
``moe`` its mixture of experts.
"""
