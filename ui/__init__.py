"""The engine manager as a page, by Gradio: on a port of its own, or as a tab of a WebUI.

`page.blocks(Manager(provider, builder))` is the whole page; `serve.start` gives it out on a port. Gradio is imported
when one of them is called, and by no other folder.
"""
