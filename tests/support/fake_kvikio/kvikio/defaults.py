from kvikio import is_to


def is_compat_mode_preferred() -> bool:
    return is_to("compat")
