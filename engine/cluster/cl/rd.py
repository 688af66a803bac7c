import base64
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
result = client.images.edit(
    image=open("examples/person.png", "rb"),
    mask=open("examples/person_mask.png", "rb"),  # transparent = edit
    prompt="a red striped shirt",
)
open("edited.png", "wb").write(base64.b64decode(result.data[0].b64_json))
