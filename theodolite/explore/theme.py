"""What gradio's own components look like on the page."""

from __future__ import annotations

import gradio as gr

from theodolite.report.style import DARK_NEUTRAL, NEUTRAL


def theme() -> gr.themes.Base:
    """The report's paper and ink; fonts are the system's own, so that none is fetched."""
    font = gr.themes.Font("sans-serif")
    base = gr.themes.Base(
        primary_hue=gr.themes.colors.sky,
        neutral_hue=gr.themes.colors.stone,
        font=[font],
        font_mono=[gr.themes.Font("monospace")],
    )
    return base.set(
        body_background_fill=NEUTRAL,
        body_background_fill_dark=DARK_NEUTRAL,
        button_primary_background_fill="#0b5d82",
        button_primary_background_fill_hover="#0a4d6c",
        button_primary_text_color="#ffffff",
        button_primary_background_fill_dark="#7cc0e0",
        button_primary_background_fill_hover_dark="#9bd0ea",
        button_primary_text_color_dark="#15191f",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_border_width_dark="0px",
        block_shadow="none",
        block_info_text_color="#646a73",
        block_info_text_color_dark="#9aa2ad",
        block_label_background_fill="transparent",
        input_background_fill="#ffffff",
        input_background_fill_dark="#1c222a",
        input_border_width="1px",
        input_border_color="#d5d1c6",
        input_border_color_dark="#2c333d",
    )
