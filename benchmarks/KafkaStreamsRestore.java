import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.EOFException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.Stream;

import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.processor.StateRestoreListener;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.Stores;

/**
 * A RocksDB store of Kafka Streams, restored from its changelog topic, for `restore.py`.
 *
 * <pre>
 *   fill BOOTSTRAP APP RAW        the changelog of one partition, of the records in a file of 16 + 100 bytes each
 *   restore BOOTSTRAP APP FOLDER  restore it into an empty folder, once; prints seconds and records
 * </pre>
 *
 * The time is from `onRestoreStart` to `onRestoreEnd`: no start of a JVM, no joining of a group.
 */
public final class KafkaStreamsRestore {
    private static final int KEY_BYTES = 16;
    private static final int VALUE_BYTES = 100;
    private static final String STORE = "last";

    public static void main(String[] args) throws Exception {
        if (args[0].equals("fill"))
            fill(args[1], args[2], Path.of(args[3]));
        else
            restore(args[1], args[2], Path.of(args[3]));
    }

    private static void fill(String bootstrap, String app, Path raw) throws Exception {
        String changelog = app + "-" + STORE + "-changelog";
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
            Map<String, String> kept = Map.of("cleanup.policy", "compact", "min.cleanable.dirty.ratio", "1", "min.compaction.lag.ms", "1000000000");
            admin.createTopics(List.of(new NewTopic(changelog, 1, (short) 1).configs(kept), new NewTopic(app + "-in", 1, (short) 1))).all().get();
        }
        Map<String, Object> settings = Map.of("bootstrap.servers", bootstrap, "batch.size", 1 << 18, "linger.ms", 20, "buffer.memory", 64L << 20);
        try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
             var in = new DataInputStream(new BufferedInputStream(Files.newInputStream(raw), 1 << 20))) {
            while (true) {
                byte[] key = new byte[KEY_BYTES];
                byte[] value = new byte[VALUE_BYTES];
                try {
                    in.readFully(key);
                } catch (EOFException e) {
                    break;
                }
                in.readFully(value);
                producer.send(new ProducerRecord<>(changelog, 0, key, value));
            }
        }
    }

    private static void restore(String bootstrap, String app, Path folder) throws Exception {
        Topology topology = new Topology();
        topology.addSource("in", Serdes.ByteArray().deserializer(), Serdes.ByteArray().deserializer(), app + "-in");
        topology.addProcessor("keep", () -> new Processor<byte[], byte[], Void, Void>() {
            @Override
            public void process(Record<byte[], byte[]> record) { }
        }, "in");
        topology.addStateStore(
            Stores.keyValueStoreBuilder(Stores.persistentKeyValueStore(STORE), Serdes.ByteArray(), Serdes.ByteArray()), "keep");
        Properties settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, app);
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, folder.toString());
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 1);
        settings.put("auto.offset.reset", "earliest");
        CountDownLatch done = new CountDownLatch(1);
        AtomicLong began = new AtomicLong();
        AtomicLong seconds = new AtomicLong();
        AtomicLong records = new AtomicLong();
        try (KafkaStreams streams = new KafkaStreams(topology, settings)) {
            streams.setGlobalStateRestoreListener(new StateRestoreListener() {
                @Override
                public void onRestoreStart(TopicPartition partition, String store, long first, long end) {
                    began.set(System.nanoTime());
                }

                @Override
                public void onBatchRestored(TopicPartition partition, String store, long end, long count) { }

                @Override
                public void onRestoreEnd(TopicPartition partition, String store, long total) {
                    seconds.set(System.nanoTime() - began.get());
                    records.set(total);
                    done.countDown();
                }
            });
            streams.start();
            done.await();
        }
        System.out.printf("{\"seconds\": %.6f, \"records\": %d}%n", seconds.get() / 1e9, records.get());
        try (Stream<Path> files = Files.walk(folder)) {
            files.sorted(Comparator.reverseOrder()).forEach(file -> file.toFile().delete());
        }
    }
}
