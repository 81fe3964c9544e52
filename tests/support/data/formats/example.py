"""Messages of tf.train.Example, by Google's protobuf."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def example_class(*, packed: bool = True) -> Any:
    """Returns tf.train.Example, made of the definitions that TensorFlow publishes."""
    field, kinds = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"example{packed}.proto", package="tf", syntax="proto3")

    def add(owner: Any, name: str, number: int, kind: int, label: int = kinds.LABEL_OPTIONAL, of: str = "") -> Any:
        made = owner.field.add(name=name, number=number, type=kind, label=label)
        if of:
            made.type_name = f".tf.{of}"
        return made

    for name, kind in (("Bytes", field.TYPE_BYTES), ("Float", field.TYPE_FLOAT), ("Int64", field.TYPE_INT64)):
        made = add(file.message_type.add(name=f"{name}List"), "value", 1, kind, field.LABEL_REPEATED)
        if name != "Bytes":
            made.options.packed = packed
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes", "float", "int64"), 1):
        made = add(feature, f"{name}_list", number, field.TYPE_MESSAGE, of=f"{name.capitalize()}List")
        made.oneof_index = 0
    holder = file.message_type.add(name="Features")
    entry = holder.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, field.TYPE_STRING)
    add(entry, "value", 2, field.TYPE_MESSAGE, of="Feature")
    add(holder, "feature", 1, field.TYPE_MESSAGE, field.LABEL_REPEATED, of="Features.FeatureEntry")
    add(file.message_type.add(name="Example"), "features", 1, field.TYPE_MESSAGE, of="Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


def example(values: dict[str, Any], *, packed: bool = True) -> bytes:
    """Returns a serialized tf.train.Example: lists of int, of float, or of bytes."""
    message = EXAMPLES[packed]()
    for name, value in values.items():
        kind = {int: "int64_list", float: "float_list", bytes: "bytes_list"}[type(value[0])]
        getattr(message.features.feature[name], kind).value.extend(value)
    return message.SerializeToString(deterministic=True)


EXAMPLES = {packed: example_class(packed=packed) for packed in (True, False)}
