"""
The architectures of transformers whose rows were looked at without TRL's padding, by the names of their classes: those
of the census (`benchmarks/results/census.json`) and those that `parity --models` trains beside stock. What each gets,
`modeling/rows/layout_choice.py` says. Rows of any other class keep TRL's padding.
"""

from packaging.version import Version
from torch import nn


# The newest transformers with which they were
NEWEST_TRANSFORMERS = Version("5.24.0")

_CAUSAL_LM = """
    AXK1 AXK2 Afmoe Apertus Apertus1p5Text Arcee AriaText BailingHybrid Bamba Bart Beam BigBird BigBirdPegasus BioGpt
    BitNet Blenderbot BlenderbotSmall Bloom Blt Camembert CodeGen Cohere Cohere2 Cohere2Moe CpmAnt Cwm Data2VecText
    DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 DiffLlama Doge Dory Dots3Note Electra Emu3 Ernie Ernie4_5 Ernie4_5_Moe
    Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba FlexOlmo Flint Fuyu GPTBigCode GPTJ GPTNeo GPTNeoX GPTNeoXJapanese
    Gemma Gemma2 Gemma3 Gemma3n Gemma4 Gemma4Unified Git Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GptOss Granite
    GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 HYV4 Helium HrmText HunYuanDenseV1
    HunYuanMoEV1 HyperCLOVAX Inkling Inkling2 Inkling2Loop Jais2 Jamba JetMoe KimiLinear Kolibri1 Laguna LaraMini Lfm2
    Lfm2Moe Lfm3 Llama Llama4 LongcatFlash MBart Mamba Mamba2 Marian MegatronBert Mellum MiMoV2Flash MiniCPM3 MiniMax
    MiniMaxM2 MiniMaxM3VL Ministral3 Mistral Mistral4 Mixtral Mllama ModernBertDecoder Moshi Mpt Musicgen MusicgenMelody
    Mvp NanoChat NemotronH OPT Olmo Olmo2 Olmo3 OlmoHybrid Olmoe PLBart Pegasus Persimmon Phi Phi3 Phi4Multimodal Phimoe
    ProphetNet Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe RecurrentGemma RemBert RoCBert RoFormer
    Roberta RobertaPreLayerNorm Rwkv SeedOss SmolLM3 SolarOpen StableLm Starcoder2 TrOCR VaultGemma Whisper XGLM
    XLMRoberta XLMRobertaXL Xmod Youtu Zamba Zamba2 Zaya xLSTM
"""
_CONDITIONAL_GENERATION = """
    Aria Blip Blip2 Cohere2Vision Cosmos3Edge Cosmos3Omni DeepseekVL DeepseekVLHybrid Dots3Note Ernie4_5_VLMoe
    Exaone4_5_ Florence2 Gemma3 Gemma4 Gemma4Unified Glm46V Glm4v Glm4vMoe Glm5Next GlmOcr GotOcr2 GraniteDocling
    HyperCLOVAXVisionV2 Idefics2 Idefics3 Inkling Inkling2 InstructBlip InstructBlipVideo InternVL Janus Kimi_K25
    Kosmos2 Kosmos2_5 Lfm2Vl Lfm3Vl LightOnOcr Llama4 Llava LlavaNext LlavaNextVideo LlavaOnevision MiniCPMOcr
    MiniCPMV4_6 MiniCPMV4_7 MiniMaxM3Sparse Mistral3 MistralLarge4 Mllama Molmo2 MossTranscribeDiarize MuseGlimmer
    MuseSpark Ovis2 PI0 PPFormulaNet PaddleOCRVL PaliGemma Pix2Struct QianfanOCR Qwen2VL Qwen2_5OmniThinker Qwen2_5_VL
    Qwen3OmniMoeThinker Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe SmolVLM Step3p7 T5Gemma2 Udop UnlimitedOcr VideoLlama3
    VideoLlava VipLlava
"""
_OTHERS = """
    BertGenerationDecoder BertLMHeadModel CTRLLMHeadModel EvollaForProteinText2Text GPT2LMHeadModel
    IdeficsForVisionText2Text NemotronH_Omni_Reasoning_V3 OpenAIGPTLMHeadModel ReformerModelWithLMHead
    VisionEncoderDecoderModel XLMWithLMHeadModel XLNetLMHeadModel
"""
TRIED = frozenset(
    [
        *(f"{name}ForCausalLM" for name in _CAUSAL_LM.split()),
        *(f"{name}ForConditionalGeneration" for name in _CONDITIONAL_GENERATION.split()),
        *_OTHERS.split(),
    ]
)


def is_tried(causal_lm: nn.Module) -> bool:
    """Return `True` if a model is of one of these architectures, under the class that FSDP2 makes of it too."""
    return any(cls.__name__ in TRIED and cls.__module__.startswith("transformers.") for cls in type(causal_lm).__mro__)
