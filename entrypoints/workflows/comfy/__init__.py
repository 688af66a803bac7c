"""ComfyUI graphs, in the form that its API takes, as workflows in the language.

    JSON --graph_reader--> Graph --composition_reader--> Composition --program--> text of a file of the language

A graph says everything of one picture; a workflow says what its requests have in common. So what a request may say,
such as prompt, seed and number of steps, becomes a default of the workflow's requests.
"""
