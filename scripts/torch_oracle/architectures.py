"""The model that a configuration names."""

import main_track
import model as gpt


def module_of(config):
    return main_track if config["model"].get("architecture") == "main_track" else gpt
