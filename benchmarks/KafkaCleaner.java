import java.io.BufferedInputStream;
import java.io.BufferedReader;
import java.io.DataInputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Comparator;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.stream.Stream;

import com.sun.management.OperatingSystemMXBean;

import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.record.CompressionType;
import org.apache.kafka.common.record.MemoryRecords;
import org.apache.kafka.common.record.MemoryRecordsBuilder;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.server.util.KafkaScheduler;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.CleanerStats;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.utils.Throttler;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

/**
 * Kafka's own cleaner on one log, for `cleaner.py`.
 *
 * <pre>
 *   fill RAW LOG RECORDS COMPRESSION SEGMENT_BYTES BATCH_BYTES   a log of the records in a file of 16 + 100 bytes each
 *   clean LOG WARM SEGMENT_BYTES                                 clean copies of it; copies of WARM before that
 * </pre>
 *
 * `clean` cleans once for each line that it reads, and prints JSON: seconds, processor seconds of the process, bytes of all segments before and after,
 * records read and kept. The buffers and the offset map are those that a broker gives one cleaner thread by default.
 */
public final class KafkaCleaner {
    private static final int KEY_BYTES = 16;
    private static final int VALUE_BYTES = 100;
    private static final int MAP_BYTES = 128 << 20;
    private static final int IO_BYTES = 256 << 10;
    private static final int WARM_ROUNDS = 4;
    private static final KafkaScheduler SCHEDULER = new KafkaScheduler(1);

    public static void main(String[] args) throws Exception {
        SCHEDULER.startup();
        if (args[0].equals("fill"))
            fill(Path.of(args[1]), Path.of(args[2]), Long.parseLong(args[3]), args[4], args[5], Integer.parseInt(args[6]));
        else
            clean(Path.of(args[1]), Path.of(args[2]), args[3]);
        SCHEDULER.shutdown();
        System.exit(0);
    }

    private static UnifiedLog open(Path folder, Map<String, String> settings) throws IOException {
        return UnifiedLog.create(folder.toFile(), new LogConfig(settings), 0, 0, SCHEDULER, new BrokerTopicStats(),
            Time.SYSTEM, 300_000, new ProducerStateManagerConfig(86_400_000, false), 600_000,
            new LogDirFailureChannel(1), true, Optional.empty());
    }

    private static void fill(Path raw, Path folder, long records, String compression, String segmentBytes, int batchBytes)
            throws IOException {
        Files.createDirectories(folder);
        Compression codec = Compression.of(CompressionType.forName(compression)).build();
        ByteBuffer buffer = ByteBuffer.allocate(2 * batchBytes);
        byte[] key = new byte[KEY_BYTES];
        byte[] value = new byte[VALUE_BYTES];
        try (DataInputStream in = new DataInputStream(new BufferedInputStream(Files.newInputStream(raw), 1 << 20));
             UnifiedLog log = open(folder, Map.of("cleanup.policy", "compact", "segment.bytes", segmentBytes))) {
            for (long written = 0; written < records; ) {
                buffer.clear();
                MemoryRecordsBuilder builder = MemoryRecords.builder(buffer, codec, TimestampType.CREATE_TIME, 0L);
                int size = 0;
                for (; written < records && size + KEY_BYTES + VALUE_BYTES <= batchBytes; written++) {
                    in.readFully(key);
                    in.readFully(value);
                    builder.append(1_700_000_000_000L, key, value);
                    size += KEY_BYTES + VALUE_BYTES;
                }
                log.appendAsLeader(builder.build(), 0);
            }
            log.roll();
            log.flush(true);
        }
    }

    private static void clean(Path folder, Path warm, String segmentBytes) throws Exception {
        Cleaner cleaner = new Cleaner(0, new SkimpyOffsetMap(MAP_BYTES), IO_BYTES, 1 << 20, 0.9,
            new Throttler(Double.MAX_VALUE, 300, "cleaner-io", "bytes", Time.SYSTEM), Time.SYSTEM, partition -> { });
        for (int i = 0; i < WARM_ROUNDS; i++)
            round(cleaner, warm, segmentBytes, false);
        System.out.println("ready");
        BufferedReader told = new BufferedReader(new InputStreamReader(System.in));
        while (told.readLine() != null)
            round(cleaner, folder, segmentBytes, true);
    }

    private static void round(Cleaner cleaner, Path folder, String segmentBytes, boolean print) throws Exception {
        Path copy = folder.resolveSibling("copy-0");
        copy(folder, copy);
        try (UnifiedLog log = open(copy, Map.of("cleanup.policy", "compact", "segment.bytes", segmentBytes))) {
            long before = log.size();
            LogToClean section = new LogToClean(log, 0, log.activeSegment().baseOffset(), false);
            long cpu = processorNanos();
            long began = System.nanoTime();
            CleanerStats stats = cleaner.clean(section).getValue();
            double seconds = (System.nanoTime() - began) / 1e9;
            double cpuSeconds = (processorNanos() - cpu) / 1e9;
            if (print)
                System.out.printf(Locale.ROOT, "{\"seconds\": %f, \"processor_seconds\": %f, \"bytes_before\": %d, "
                    + "\"bytes_after\": %d, \"read\": %d, \"kept\": %d}%n", seconds, cpuSeconds, before, log.size(),
                    stats.messagesRead(), stats.messagesWritten());
        }
        delete(copy);
    }

    private static long processorNanos() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    /** Segments are linked, for the cleaner replaces them whole; indexes are copied. */
    private static void copy(Path from, Path to) throws IOException {
        delete(to);
        Files.createDirectories(to);
        try (Stream<Path> files = Files.list(from)) {
            for (Path file : (Iterable<Path>) files::iterator) {
                if (file.toString().endsWith(".log"))
                    Files.createLink(to.resolve(file.getFileName()), file);
                else
                    Files.copy(file, to.resolve(file.getFileName()));
            }
        }
    }

    private static void delete(Path folder) throws IOException {
        if (!Files.exists(folder))
            return;
        try (Stream<Path> files = Files.walk(folder)) {
            List<Path> all = files.sorted(Comparator.reverseOrder()).toList();
            for (Path file : all)
                Files.deleteIfExists(file);
        }
    }

    private KafkaCleaner() { }
}
