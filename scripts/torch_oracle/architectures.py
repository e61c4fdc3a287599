"""The module that knows a configuration's parameters: parameter_table, init_parameters, muon_matrices, decays and keeps_master."""

import main_track_parameters
import model as gpt


def is_main_track(config):
    return config["model"].get("architecture") == "main_track"


def module_of(config):
    return main_track_parameters if is_main_track(config) else gpt
